"""Web: results as pages that open without a network. `charts` makes Plotly figures as plain values, `document` puts
them into one HTML file; `plan_report`, `whatif` and `app` compose pages."""
