"""One HTML file with style, script, Plotly and figures, which by its content security policy loads nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from pstar_sim.errors import PstarError
from pstar_sim.report.palette import ON_DARK
from pstar_sim.report.web.charts import THEMES

MOST_NARROW = 3


@cache
def plotly_script() -> str:
    """Raises PstarError without the package, saying what to install."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise PstarError(
            "a page needs plotly, which is not installed: pip install -e '.[report]' in the checkout"
        ) from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def document(title: str, body: str, data: Mapping[str, Any], *, script: str) -> str:
    """data: for the script,
    script: a file beside this module.

    Raises PstarError without Plotly.
    """
    plotly = plotly_script()
    here = files("pstar_sim.report.web")
    style = (here / "page.css").read_text(encoding="utf-8")
    own = "\n".join((here / name).read_text(encoding="utf-8") for name in ("page.js", script))
    values = json.dumps({"themes": THEMES, **data}, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")
    allowed = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="values">{values}</script>
<script>{plotly}</script>
<script>
{own}</script>
</body>
</html>
"""


def chart_place(name: str, says: str) -> str:
    """Where the page draws figure `name`.

    says: the picture, for screen readers.
    """
    return f'<div class="chart" role="img" aria-label="{escape(says)}" data-figure="{escape(name)}"></div>'


def legend_html(legend: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """Colours may be the theme's.

    lines: name -> CSS style.
    """
    items = (f"<li>{_swatch(_css(colour), lines.get(name))}{escape(name)}</li>" for name, colour in legend.items())
    return f'<ul class="legend">{"".join(items)}</ul>'


def _swatch(colour: str, line: str | None) -> str:
    if line is None:
        return f'<span class="swatch" style="background:{colour}"></span>'
    return f'<span class="swatch line" style="border-top:3px {line} {colour}"></span>'


def breakable(text: str) -> str:
    """Policies may break behind name and options."""
    return re.sub(r"([:,=])(?=\S)", r"\1<wbr>", escape(text, quote=False))


def unbroken(text: str) -> str:
    """Keeps a number on one line with its error and unit."""
    return re.sub(r" (?=[±%]|(?:s|ms|us|GB|days)\b)|(?<=±) ", "&nbsp;", escape(text, quote=False))


def _css(colour: str) -> str:
    if colour.startswith("@"):
        return f"var(--{colour.removeprefix('@')})"
    return f"light-dark({colour}, {ON_DARK[colour][0]})" if colour in ON_DARK else colour


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names rows. On a narrow screen, more than MOST_NARROW columns become a list, a line each."""
    wide = len(heads) > MOST_NARROW
    top = "".join(f'<th scope="col">{breakable(head)}</th>' for head in heads)
    lines = []
    for first, *others in rows:
        named = zip(heads[1:] if wide else [""] * len(others), others, strict=True)
        cells = "".join(
            f'<td data-head="{escape(head)}">{escape(cell)}</td>' if head else f"<td>{escape(cell)}</td>"
            for head, cell in named
        )
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    kind = "scroll wide" if wide else "scroll"
    return f'<div class="{kind}"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
