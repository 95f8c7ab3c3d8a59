"""Predicted against published, for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pstar_sim.terminal import table_text, terminal_width, wrap
from pstar_sim.validation.expected_errors import binomial_interval, inside_by_source, quoted_bars
from pstar_sim.validation.experiments import NOTES, UNEXPLAINED
from pstar_sim.validation.results import FAR, NEAR, Errors, Result, Validation, errors_of
from pstar_sim.validation.scope import published_scope


def validation_text(validation: Validation, *, width: int | None = None, every_row: bool = False) -> str:
    """What `pstar validate` prints.

    every_row: each in scope, too.
    """
    width = width or terminal_width()
    v = validation

    def folded(texts: Iterable[str]) -> str:
        return "".join(f"{line}\n" for text in texts for line in wrap(text, width))

    counts = ", ".join(f"{count} {_USES[use]}" for use, count in v.counts.items() if count)
    parts = [folded([f"{sum(v.counts.values())} published rows: {counts}"])]
    if not v.results:
        return "\n".join([*parts, folded(["Not compared:", *(f"  {name}: {why}" for name, why in v.left_out.items())])])
    parts.append(summary_text(v, width))
    if len({r.file for r in v.results}) > 1:
        parts.append(files_text(v, width))
    if len(v.by_distance()) > 1:
        parts.append(distance_text(v, width))
    parts.append(folded([*_verdict(v), *_inside(v)]))
    if every_row:
        parts.append(_rows_text("Rows in scope", list(v.results), width))
    if missed := v.misses():
        parts.append(_rows_text(f"Tested rows off by more than {FAR:.0%}", missed, width))
    if wrong := _wrong_orders(v):
        parts.append(folded(["Pairs in the wrong order:", *wrong]))
    if reasons := _reasons(v):
        parts.append(folded(["Runs that do not fit here:", *reasons]))
    for title, notes in (("Assumed", NOTES), ("Not explained, and not tuned away", UNEXPLAINED)):
        parts.append(folded([f"{title}:", *(f"  {note}" for note in notes)]))
    return "\n".join(parts)


def _reasons(v: Validation) -> list[str]:
    return [f"  {reason}" for reason in sorted({r.reason for r in v.results if r.reason})]


def _wrong_orders(v: Validation) -> list[str]:
    return [
        f"  {p.first.system} and {p.second.system}, {p.first.params} and {p.second.params}, {p.first.gpus} GPUs: "
        f"{p.first.metric} {_figure(p.first.published)} and {_figure(p.second.published)}, predicted "
        f"{_figure(p.first.predicted)} and {_figure(p.second.predicted)}"
        for p in v.pairs()
        if not p.kept
    ]


_USES = {
    "fitted": "fitted",
    "to fit": "kept for the next fit",
    "tested": "tested",
    "no policy": "of systems without a policy yet",
    "out": "out of scope",
}


def summary_text(v: Validation, width: int) -> str:
    """Per machine and system: rows, and errors of times, phases and memory."""
    heads = ("machine", "system", "use", "rows", "median", "90th", "time", "phases", "memory")
    lines: dict[tuple[str, str, str], list[Result]] = {}
    for r in v.results:
        lines.setdefault((_short(r), _family(r.system), r.use), []).append(r)
    rows = [(*key, *_cells(Validation(counts={}, results=tuple(results)))) for key, results in lines.items()]
    sums = len(rows)
    for use in ("tested", "fitted", "to fit"):
        part = Validation(counts={}, results=tuple(r for r in v.results if r.use == use))
        if part.results:
            rows.append(("all", "", use, *_cells(part)))
    return table_text(heads, rows, width=width, keys=3, rule_before=sums)


def files_text(v: Validation, width: int) -> str:
    """Per file and use: errors, bias, runs that do not fit, orders kept."""
    heads = ("rows of", "use", "rows", "median", "90th", "bias", "do not fit", "systems", "models")
    rows: list[tuple[str, ...]] = []
    for file in dict.fromkeys(r.file for r in v.results):
        for use in dict.fromkeys(r.use for r in v.results if r.file == file):
            part = replace(v, results=tuple(r for r in v.results if (r.file, r.use) == (file, use)))
            e = part.errors()
            assert e is not None
            bias = "" if e.bias is None else f"{e.bias:+.1%}"
            orders = (_kept(*part.order(kind)) for kind in ("systems", "models"))
            name = file.removesuffix(".csv")
            rows.append((name, use, str(e.rows), _share(e.median), _share(e.p90), bias, str(e.lost or ""), *orders))
    return table_text(heads, rows, width=width, keys=2)


def distance_text(v: Validation, width: int) -> str:
    """Per distance of tested times from fitted rows' machines."""
    rows = [
        (name, str(e.rows), _share(e.median), _share(e.p90), "" if e.bias is None else f"{e.bias:+.1%}")
        for name, e in v.by_distance().items()
    ]
    heads = ("tested times, from the fitted times", "rows", "median", "90th", "bias")
    return table_text(heads, rows, width=width, keys=1)


def _inside(v: Validation) -> list[str]:
    """Rows inside the bar of their class, and of all rows, without their source."""
    quoted = quoted_bars(v.results)
    if not quoted:
        return []
    lines = ["iterations inside the bar (one standard deviation) that the other sources alone would quote for them"]
    for own, name in ((True, "a bar of the class"), (False, "the bar of all rows")):
        rows = [one for one in quoted if one.of_class is own]
        if rows:
            inside = sum(abs(one.row.error) <= one.bar for one in rows)
            low, high = binomial_interval(len(rows))
            wanted = f"{low} to {high}" if own else f"at least {low}"
            alike = f"{_share(inside_by_source(rows))} by source"
            lines.append(f"  {name}: {inside} of {len(rows)}, {_share(inside / len(rows))} ({wanted} wanted), {alike}")
    return lines


def _kept(kept: int, pairs: int) -> str:
    return f"{kept} of {pairs}" if pairs else ""


def _cells(part: Validation) -> list[str]:
    whole = part.errors()
    assert whole is not None
    kinds = (part.errors(kind="time"), part.errors(kind="phase"), part.errors(kind="memory"))
    return [str(whole.rows), _share(whole.median), _share(whole.p90), *(_median(e) for e in kinds)]


def _verdict(v: Validation) -> list[str]:
    tested = v.errors(use="tested")
    lines: list[str] = []
    if tested is not None:
        lines.append(
            f"tested rows: median {_held(tested.median, NEAR)}, 90th percentile {_held(tested.p90, FAR)}, "
            f"worst {tested.worst:+.0%}"
        )
    later = [r for r in v.first_replayed().results if r.use == "tested"]
    new = errors_of(later)
    if new is not None:
        looked_at = {rule.name for rule in published_scope() if rule.looked_at}
        seen = sum(r.rule in looked_at for r in later)
        lines.append(
            f"tested rows that had never been replayed when their scope was fixed: {new.rows}, median "
            f"{_share(new.median)}, 90th percentile {_share(new.p90)}, {new.lost} of them do not fit"
            + (f"; choices of ours were fixed with figures of {seen} of them, or about them, in view" if seen else "")
        )
    for kind, what in (("systems", "systems on one machine and model"), ("models", "models of one system")):
        kept, pairs = v.order(kind)
        if pairs:
            lines.append(f"order of {what} that differ by more than 10%: kept in {kept} of {pairs} pairs")
    return lines


def _held(value: float, wanted: float) -> str:
    return f"{_share(value)} (at most {wanted:.0%} wanted{': missed' if value > wanted else ''})"


def _rows_text(title: str, rows: Sequence[Result], width: int) -> str:
    heads = (
        "row", "machine", "system", "GPUs", "parameters", "batch", "metric", "published", "predicted", "error",
    )  # fmt: skip
    cells = [
        (
            r.where,
            _short(r),
            r.system,
            str(r.gpus),
            _params(r.params),
            r.batch,
            r.metric,
            _figure(r.published),
            "does not fit" if r.predicted is None else _figure(r.predicted),
            "" if r.predicted is None else f"{r.error:+.0%}",
        )
        for r in rows
    ]
    return table_text(heads, cells, width=width, title=title)


def _family(system: str) -> str:
    words = [w for w in system.split(" ") if not w.startswith(("gap", "ratio"))]
    return " ".join(words)


def _short(r: Result) -> str:
    if r.hardware.startswith("Polaris"):
        return f"Polaris, {r.nodes}x4 A100-40" if r.nodes > 1 else "Polaris, 1-4 A100-40"
    for text, short in (
        ("4xH100", "node of 4 H100-80"),
        ("8xA100-80GB (MosaicML)", "node of 8 A100-80"),
        ("8xH100-80GB (MosaicML)", "node of 8 H100-80"),
        ("1xTesla_V100", "1 V100-32 PCIe, fp32"),
        ("1xNVIDIA_A100_80GB_PCIe", "1 A100-80 PCIe, fp32"),
        ("1xNVIDIA_H100", "1 H100-80, fp32"),
        ("4xNVIDIA_A100", "4 A100-40, fp32"),
        ("4xNVIDIA_H100", "4 H100-80, fp32"),
        ("8xV100", "Yard, 1-8 V100-32"),
        ("1xV100-32GB (Yard)", "Yard, 1-8 V100-32"),
        ("1xV100-SXM3", "DGX-2, 1 V100-32"),
        ("1xV100-32GB, 12 cores", "VM, 1 V100-32, fp32"),
    ):
        if r.hardware.startswith(text):
            return short
    if match := _NODES.match(r.hardware):
        return f"{match[1]}-80, nodes of 8"
    return r.hardware


_NODES = re.compile(r"\d+ nodes of \d+x(\w+)-80GB")


def _params(text: str) -> str:
    return f"{float(text) / 1e9:.1f} B" if text.replace(".", "").replace("e", "").isdigit() else text


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _median(errors: Errors | None) -> str:
    return "" if errors is None else _share(errors.median)


def _figure(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value / 1e9:.3g} B" if value >= 1e8 else f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
