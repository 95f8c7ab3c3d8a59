"""Web: results as pages that one opens without a network. `charts` makes Plotly figures as plain values, `document`
puts them into one HTML file; `plan_report` and `whatif` say what stands on the two pages, `app` is the page of
`pstar app`."""
