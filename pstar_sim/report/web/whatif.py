"""Points of sweeps as one HTML file, among which readers choose.

[Note: errors of a page] Seconds, and what follows from them, have validation's error for the class of machine; the
largest model lies between the largest that fits and the sweep's next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from html import escape
from pathlib import Path
from typing import Any

from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.catalog.prices import load_prices
from pstar_sim.core.figures import BINDS_WORDS
from pstar_sim.errors import PstarError
from pstar_sim.planner.grid import machine_of
from pstar_sim.planner.trust import untuned
from pstar_sim.report.palette import policy_colours
from pstar_sim.report.web.document import document
from pstar_sim.units import format_error
from pstar_sim.version import __version__

TOKENS, DAYS = 3e9, 14.0
_FIGURES = (
    "fits", "iteration_s", "tokens_per_s", "gap", "bound_by", "peak_gpu_bytes", "peak_host_bytes", "expected_error",
)  # fmt: skip
_NAMES = {"seq": "tokens per sequence", "micro_batches": "micro-batches"}


def whatif_page(points: Sequence[Mapping[str, object]], axes: Sequence[str], *, prices: str | None = None) -> str:
    """points: rows of results; of two for the same point the later counts.
    axes: the unchanged figure where a point lacks one.
    prices: over the shipped ones.

    Raises PstarError for no points, axes without machine or policy, and without Plotly.
    """
    model = "model" if "model" in axes else "trace"
    if not points or not {"machine", "policy", model} <= {*axes}:
        raise PstarError("a page needs the points of a sweep, with machine, policy, and model or trace")
    axes = _in_order(axes, model)
    points = distinct_points(points, axes)
    values = {axis: _values(points, axis) for axis in axes}
    params: list[int | None] = [None] * len(values[model])
    if model == "model":
        values[model].sort(key=lambda name: model_entry(str(name)).params)
        params = [model_entry(str(name)).params for name in values[model]]
    parts = _parts(axes)
    index = {axis: {value: n for n, value in enumerate(found)} for axis, found in values.items()}
    reasons = {text: n for n, text in enumerate(dict.fromkeys(_reason(p) for p in points if not p.get("fits")))}
    rows = {
        tuple(index[axis][_value(p, axis)] for axis in axes): [
            *(p.get(name) for name in _FIGURES),
            None if p.get("fits") else reasons[_reason(p)],
        ]
        for p in points
    }
    costs = _costs(points, ["machine", *parts], prices)
    data = {
        "axes": [
            {"name": axis, "title": _title(axis), "values": values[axis], "labels": _labels(axis, values[axis])}
            for axis in axes
        ],
        "model": model,
        "figures": [*_FIGURES, "why"],
        "reasons": [*reasons],
        "rows": [[*at, *figures] for at, figures in rows.items()],
        "prices": costs,
        "params": params,
        "binds": BINDS_WORDS,
        "colours": policy_colours(str(policy) for policy in values["policy"]),
        "tokens": TOKENS,
        "days": DAYS,
    }
    alone = [axis for axis in axes if len(values[axis]) == 1 and values[axis] != [""]]
    fixed = [f"{_title(axis)} {_labels(axis, values[axis])[0]}" for axis in alone]
    said = f"{len(points):,} points of pstar-sim {__version__}, {date.today().isoformat()}" + (
        f"; in all: {', '.join(fixed)}" if fixed else ""
    )
    return document("What if?", _body(said), data, script="whatif.js")


def distinct_points(points: Sequence[Mapping[str, object]], axes: Sequence[str]) -> list[Mapping[str, object]]:
    """Of several rows for the same point, the last."""
    return list({tuple(_value(point, axis) for axis in axes): point for point in points}.values())


def _reason(point: Mapping[str, object]) -> str:
    """Without the policy, and what needs the room."""
    text = str(point.get("reason")).removeprefix(f"{point.get('policy')} does not fit: ")
    return re.sub(r" \(.*\)(?= but )", "", text)


def _parts(axes: Sequence[str]) -> list[str]:
    return [axis for axis in axes if axis.startswith("set.")]


def _in_order(axes: Sequence[str], model: str) -> list[str]:
    others = [axis for axis in axes if axis not in ("machine", model, "policy", *_parts(axes))]
    return ["machine", *_parts(axes), model, *others, "policy"]


def _value(point: Mapping[str, object], axis: str) -> object:
    """The value "x1" is an unchanged figure."""
    value = point.get(axis)
    return "x1" if value is None and axis.startswith("set.") else "" if value is None else value


def _values(points: Sequence[Mapping[str, object]], axis: str) -> list[object]:
    return list(dict.fromkeys(_value(point, axis) for point in points))


def _labels(axis: str, values: Sequence[object]) -> list[object]:
    """Files without folders, where names differ: a page is sent to others."""
    names: list[object] = [Path(str(value)).name for value in values]
    return names if axis in ("machine", "trace") and len({*names}) == len(names) else list(values)


def _title(axis: str) -> str:
    return axis.removeprefix("set.").replace(".", " ") if axis.startswith("set.") else _NAMES.get(axis, axis)


def _costs(points: Sequence[Mapping[str, object]], parts: Sequence[str], prices: str | None) -> dict[str, Any]:
    """A machine's axes, joined by "|" -> [USD per hour, source], or None."""
    known = load_prices(prices)
    found: dict[str, Any] = {}
    for point in points:
        values = [_value(point, axis) for axis in parts]
        key = "|".join(map(str, values))
        if key in found:
            continue
        name = str(point["machine"])
        price = known.get(name)
        found[key] = None
        if price is not None and not any(axis == "set.gpus" and value != "x1" for axis, value in zip(parts, values)):
            changes = tuple((a, v) for a, v in zip(parts, values) if a != "machine" and v != "x1")
            try:
                machine = machine_of(name, changes)
            except PstarError:  # a user's machine file that is not here: neither its nodes nor its price is known
                continue
            when = "" if price.as_of is None else f", {price.as_of}"
            usd = machine.price_usd_per_hour or price.usd_per_hour * machine.nodes
            found[key] = [usd, f"{price.offer or price.source}{when}"]
    return found


def _body(said: str) -> str:
    """said: what is the same in all points."""
    says = "dollars per million tokens and tokens per second of every machine and policy, with their errors"
    return f"""<div class="row"><h1>What if?</h1>
<button data-theme-button aria-label="change between light and dark">dark</button></div>
<p>{escape(said)}.</p>
<p class="soft">Every figure comes from a sweep that pstar-sim has planned and simulated. ± is one standard deviation
that validation found for this class of machine; without runs of two sources the bar is at least
{format_error(untuned())}, that of all published runs together. Bytes are those that the plan takes, and a run stays
within them.</p>
<div class="row choices" id="choices"></div>
<h2>This job</h2><p class="answer" id="job" aria-live="polite"></p><div id="job-table"></div>
<p class="note" id="job-reasons"></p>
<h2>The largest model on this machine</h2><p class="answer" id="largest" aria-live="polite"></p>
<div id="largest-table"></div>
<h2>The cheapest machine for this model</h2>
<div class="choices"><label>tokens, in billions<input id="tokens" type="number" min="0.001" step="any"></label>
<label>days<input id="days" type="number" min="0.1" step="any"></label></div>
<p class="answer" id="cheapest" aria-live="polite"></p><div id="cheapest-table"></div><p class="note" id="prices"></p>
<div data-priced>
<p class="note">A price is what its list said on that day. It is no prediction and has no bar; $ have the bar of the
seconds.</p>
<div id="legend"></div><div class="chart" role="img" aria-label="{escape(says)}" id="pareto"></div>
<p class="note">A point is a machine with a policy; its bars are the errors. No other point is both cheaper and faster
than those on the line.</p></div>
<h2>What another part brings</h2><p class="answer" id="more" aria-live="polite"></p><div id="more-table"></div>
<p class="note">Both times of a change come from one model of one machine, so most of their errors go the same way. The
bar of a change is that of both times, on the seconds by which they differ.</p>"""
