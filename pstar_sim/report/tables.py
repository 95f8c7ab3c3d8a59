"""Tables and notes for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pstar_sim.catalog.loader import as_listed
from pstar_sim.core.figures import BINDS_NAMES
from pstar_sim.errors import NothingFits
from pstar_sim.planner.confidence import confidence, confidence_line, worst_known
from pstar_sim.planner.machine_notes import units_notes
from pstar_sim.planner.trust import error_of_change
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.terminal import table_text, terminal_width, wrap
from pstar_sim.units import GB, format_bytes, format_params, format_s
from pstar_sim.workload.kernels import kernels_text
from pstar_sim.workload.workload import activations_text

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.core.plan import Plan, Settings
    from pstar_sim.planner.compare import Comparison, Row
    from pstar_sim.workload.workload import Workload


class TableAnswer(Protocol):
    @property
    def workload(self) -> Workload: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def batch(self) -> int: ...


def heading(answer: TableAnswer) -> str:
    """Job, setting and machine, of "here" also parts found and assumed."""
    w, m, s = answer.workload, answer.machine, answer.settings
    barrier = s.barrier(w.compute_dtype)
    parts = [
        f"{w.model}, {format_params(w.params)} parameters",
        batch_words(answer),
        f"sequence {w.sequence}",
        w.dtype,
        *([w.optimizer.words] if w.optimizer.words else []),
        activations_text(w) if w.activations else "checkpointing" if w.checkpointing else "no checkpointing",
        *([kernels_text(w.kernels)] if w.kernels else []),
        f"update {s.update}",
        "clipping" if s.clip else "no clipping",
        f"barrier: {barrier}" if barrier else "no barrier",
        *(["run by session.step"] if s.loop == "step" else []),
        *([f"{s.sums} sums"] if s.sums != "32-bit" else []),
        *([f"effort {s.effort:g}"] if s.effort != 1 else []),
        *([w.notes] if w.notes else []),
    ]
    each = f"{m.world_size} GPUs, each with " if m.world_size > 1 else ""
    where = (
        f"{m.name}: {each}{format_bytes(m.gpu_budget_bytes)} of GPU and {format_bytes(m.host_budget_bytes)} of host "
        "memory"
    )
    lines = [", ".join(parts), f"on {where} ({worst_known(confidence(w, m))})"]
    lines += units_notes(m, w.compute_dtype)
    if m.name == "here" and m.notes:
        lines.append(f"here: {m.notes}")
    return "\n".join(lines)


def _costs_left_out(comparison: Comparison) -> bool:
    waits = comparison.settings.barrier(comparison.workload.dtype) is not None
    return waits and bool(comparison.planned) and all(row.barrier_cost_s is None for row in comparison.rows)


def batch_words(answer: TableAnswer) -> str:
    """Of all GPUs together, and the share of each."""
    w, ranks = answer.workload, answer.machine.data_parallel_size
    words = f"batch {answer.batch}"
    if w.micro_batches > 1:
        words += f" x {w.micro_batches} micro-batches"
    if ranks > 1:
        words += f" ({'' if w.batch * ranks == answer.batch else 'at most '}{w.batch} per GPU)"
    return words


def plan_words(plan: Plan) -> str:
    w, m = plan.workload, plan.machine
    each = f"{w.batch}{f' on each of {m.world_size} GPUs' if m.world_size > 1 else ''}"
    batch = f"{format_params(w.params)} parameters, batch {plan.own_batches or each}"
    return job_words(w, m, batch + (f" x {w.micro_batches} micro-batches" if w.micro_batches > 1 else ""))


def job_words(w: Workload, machine: Machine, batch: str) -> str:
    """Title of a picture or a page."""
    parts = (w.model, batch, f"sequence {w.sequence}", w.dtype, w.notes)
    return f"{', '.join(filter(None, parts))}, on {machine_words(machine)}"


def machine_words(machine: Machine) -> str:
    """Its name, and the sizes of memory that are not those of the catalog."""
    listed = as_listed(machine)
    if listed is None:
        return machine.name
    sizes = (
        (machine.gpu.memory_bytes, listed.gpu.memory_bytes, "GPU"),
        (machine.host.memory_bytes, listed.host.memory_bytes, "host"),
    )
    changed = [f"{round(now / GB, 2):g} GB of {place} memory" for now, usual, place in sizes if now != usual]
    return machine.name + (f" with {' and '.join(changed)}" if changed else "")


HEADS = (
    "policy", "fits", "iteration", "tokens/s", "over bound", "binds", "GPU peak", "host peak", "h2d", "d2h",
    "barrier costs",
)  # fmt: skip


def cells(row: Row, *, best: bool = False) -> tuple[str, ...]:
    """In the order of HEADS. A missing figure is empty."""
    if not row.fits:
        return (row.policy, "no", *[""] * 9)
    return (
        row.policy,
        "best" if best else "yes",
        format_s(row.iteration_s) if row.iteration_s is not None else "",
        f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else "",
        format_percent(row.gap) if row.gap is not None else "",
        BINDS_NAMES.get(row.bound_by or "", row.bound_by or ""),
        format_size(row.peak_gpu_bytes),
        format_size(row.peak_host_bytes),
        format_size(row.h2d_bytes),
        format_size(row.d2h_bytes),
        "-" if row.barrier_cost_s is None else format_s(row.barrier_cost_s) if row.barrier_cost_s >= 5e-7 else "0 s",
    )


def format_size(size_bytes: float | None) -> str:
    """Tenths of a GB from 1 GB on."""
    if size_bytes is None:
        return ""
    return f"{size_bytes / GB:.1f} GB" if abs(size_bytes) >= GB else format_bytes(size_bytes)


def format_change(change: float, *errors: float | None) -> str:
    """A share with its bar.

    errors: bars of both times.
    """
    known = [error for error in errors if error is not None]
    return format_barred(change, error_of_change(change, *known) if len(known) == len(errors) else None)


def format_barred(change: float, bar: float | None) -> str:
    """Shares: "-2.1 ± 0.4 %", "?" without a bar. Two digits after the point below 1 %, three below 0.1 %, so that a
    small change's bar is not 0."""
    if abs(change) < 5e-5:
        return "no change"
    digits = 3 if abs(change) < 0.000995 else 2 if abs(change) < 0.00995 else 1
    words = "?" if bar is None else f"{bar * 100:.{digits}f}"
    return f"{change * 100:+.{digits}f} ± {words} %"


def format_percent(share: float) -> str:
    """Below 1 % it has two digits after the point."""
    percent = round(share * 100, 9) + 0.0  # rounding of a sum must not show as a negative share
    return f"{percent:.2f} %" if abs(percent) < 0.995 else f"{percent:.1f} %"


def reasons(comparison: Comparison) -> list[str]:
    """For each policy that does not fit: reason, lacking bytes, and a change that helps. If nobody named policies, one
    text for all, and if none fits the nearest's."""
    unfit = [row for row in comparison.rows if not row.fits]
    told = [row for row in unfit if comparison.named or row.short_of is None]
    short = sorted((row for row in unfit if row not in told), key=_lacking)
    told += short[:1] if len(unfit) == len(comparison.rows) else []
    texts = [row.reason or f"{row.policy} does not fit" for row in told]
    lacks = ", ".join(f"{row.policy} lacks {format_size(_lacking(row))} of {row.short_of}" for row in short)
    return [*texts, f"do not fit: {lacks} (`pstar fits --why` says why)"] if short else texts


def _lacking(row: Row) -> int:
    return (row.needed_bytes or 0) - (row.available_bytes or 0)


def shown(comparison: Comparison) -> tuple[list[Row], list[Row]]:
    """Rows, the best first, and equals, which have none where nobody named the policies."""
    rows = sorted(comparison.rows, key=lambda row: (not row.fits, row.iteration_s or 0.0))
    try:
        best = comparison.best().row
    except NothingFits:
        return rows, []
    limit_s = (best.iteration_s or 0.0) * (1 + AS_FAST)
    equals = [row for row in rows if row is not best and row.fits and (row.iteration_s or 0.0) <= limit_s]
    others = [row for row in rows if row is not best and (comparison.named or row not in equals)]
    return [best, *others], [] if comparison.named else equals


def comparison_text(comparison: Comparison, *, width: int | None = None) -> str:
    width = terminal_width() if width is None else width
    rows, equals = shown(comparison)
    marked = len(comparison.rows) > 1
    table = table_text(HEADS, [cells(row, best=marked and n == 0) for n, row in enumerate(rows)], width=width)
    lines = [*wrap(heading(comparison), width), "", table.rstrip()]
    if equals:
        lines += wrap(f"as fast as {rows[0].policy}: {', '.join(row.policy for row in equals)}", width)
    for text in _bounds(comparison.rows):
        lines += ["", *wrap(text, width)]
    lines.append("")
    known = [(row.policy, row.trust) for row in comparison.rows if row.fits]
    for line in (confidence_line(confidence(comparison.workload, comparison.machine)), *trust_lines(known)):
        lines += wrap(line, width)
    if _costs_left_out(comparison):
        lines += wrap("barrier costs: with --barrier-costs, which plans every policy again, without its barrier", width)
    return "\n".join([*lines, *_remarks(comparison, width)]) + "\n"


def refusal_text(comparison: Comparison, *, width: int | None = None) -> str:
    """Why there is no plan, and the smallest change."""
    width = terminal_width() if width is None else width
    return "\n".join([*wrap(heading(comparison), width), *_remarks(comparison, width)]) + "\n"


def _remarks(comparison: Comparison, width: int) -> list[str]:
    said = (*reasons(comparison), *(f"note: {note}" for note in comparison.notes))
    return [line for text in said for line in ("", *wrap(text, width))]


def trust_lines(pairs: Sequence[tuple[str, str | None]]) -> list[str]:
    """Of shown times.

    pairs: (policy, its error's label).
    """
    by_label: dict[str, list[str]] = {}
    for policy, label in pairs:
        if label is not None:
            by_label.setdefault(label, []).append(policy)
    if not by_label:
        return []
    if len(by_label) == 1:
        return [f"times: {next(iter(by_label))}"]
    return ["times: " + "; ".join(f"{', '.join(names)} {label}" for label, names in by_label.items())]


def sources_of_times(workload: Workload, machine: Machine, pairs: Sequence[tuple[str, str | None]]) -> list[str]:
    """How inputs of shown times are known, and errors."""
    errors = trust_lines(pairs)
    return [f"inputs: {confidence_line(confidence(workload, machine))}", *errors] if errors else []


def _bounds(rows: Sequence[Row]) -> list[str]:
    policies: dict[tuple[float | None, str], list[str]] = {}
    for row in rows:
        policies.setdefault((row.lower_bound_s, _certificate(row)), []).append(row.policy)
    out: list[str] = []
    for (seconds, words), names in policies.items():
        others = [row.policy for row in rows if row.policy not in names]
        whose = f"all policies but {', '.join(others)}" if len(names) > len(others) else ", ".join(names)
        what = "no lower bound" if seconds is None else "lower bound of this setting"
        what += f" for {whose}" if others else ""
        what += "" if seconds is None else f": {format_s(seconds)} per iteration"
        out.append(f"{what} ({words})" if words else what)
    return out


def _certificate(row: Row) -> str:
    said = row.certificate or {}
    if said.get("bound") is None:
        return str(said.get("reason", ""))
    return f"{said['bound']}, {BINDS_NAMES.get(str(said['binding']), said['binding'])} binds; {said['relative_to']}"
