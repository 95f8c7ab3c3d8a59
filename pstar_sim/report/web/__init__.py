"""Web: results as pages that open without a network. `charts` makes Plotly figures as plain values, and `document` puts
them into one HTML file. `plan_report` and `whatif` compose these two pages; `app` is the page of `pstar app`."""
