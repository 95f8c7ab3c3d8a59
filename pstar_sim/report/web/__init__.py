"""Results as pages that open without a network: `charts` makes Plotly figures, `document` one HTML file; `plan_report`,
`whatif` and `app` compose pages."""
