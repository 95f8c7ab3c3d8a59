"""Web: results as pages that one opens without a network. `charts` makes Plotly figures as plain values, `document`
puts them into one HTML file, `plan_report` says what stands on the report of plans."""
