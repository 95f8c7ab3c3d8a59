"""Fits, limits, offers, sensitivities as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pstar_sim.planner.batch_shares import UNMODELLED, unmodelled_notes
from pstar_sim.planner.machine_notes import added_gpus_notes, attention_notes, pinned_notes, thread_notes, units_notes
from pstar_sim.planner.nearest import as_flags, brings_words
from pstar_sim.planner.trust import NOT_NEAR
from pstar_sim.policy.registry import words_of_others
from pstar_sim.report.tables import (
    batch_words,
    format_barred,
    format_percent,
    format_size,
    machine_words,
    sources_of_times,
    trust_lines,
)
from pstar_sim.terminal import table_text, terminal_width, wrap
from pstar_sim.units import format_bytes, format_error, format_params, format_s
from pstar_sim.validation.published_limits import PublishedLimit, published_limits
from pstar_sim.workload.kernels import kernels_text
from pstar_sim.workload.loading import EACH_FP32, Loading, loading_of

if TYPE_CHECKING:
    from pstar_sim.catalog.machine import Machine
    from pstar_sim.planner.cheapest import Cheapest, Offer
    from pstar_sim.planner.fits import Fit, Fits, SmallestChange
    from pstar_sim.planner.limits import Limit, Limits
    from pstar_sim.planner.sensitivity import PartEffect, Sensitivity
    from pstar_sim.workload.workload import Tensor


def _params(count: float | None) -> str:
    return "" if count is None else format_params(count)


def _folded(texts: Sequence[str], width: int) -> list[str]:
    return [line for text in texts for line in wrap(text, width)]


def _notes(texts: Sequence[str], width: int) -> list[str]:
    return [line for text in texts for line in ("", *wrap(text, width))]


_DATA_PARALLEL = (
    "data parallel only: other parallelism (--parallel auto) is the likely choice where many GPUs are needed"
)


def _memory(machine: Machine) -> str:
    gpu, host = format_bytes(machine.gpu_budget_bytes), format_bytes(machine.host_budget_bytes)
    return f"{gpu} of GPU and {host} of host memory"


def _kernels(kernels: str) -> str:
    return f", {kernels_text(kernels)}" if kernels else ""


def fits_text(answer: Fits, *, width: int | None = None, why: bool = False) -> str:
    """why: also what fills the host, equals of the recommended policy, and what would make each other fit."""
    width = terminal_width() if width is None else width
    lines = [*_folded((*_verdict(answer), "", *_asked(answer)), width), ""]
    heads, parts = _part_cells(answer)
    lines += [table_text(heads, parts, width=width, rule_before=len(parts) - 1).rstrip(), ""]
    equals = () if why or answer.named else answer.fastest[1:]
    rows = [row for row in _by_time(answer) if row not in equals]
    columns = ["policy", "fits", "GPU needs", "GPU left", "host needs", "host left", "iteration"]
    columns += ["rounding", "start-up", "buffers"] if why else []
    cells = [_fit_cells(row, best=row in answer.fastest[:1] and len(answer.rows) > 1, why=why) for row in rows]
    if why and any(row.changes for row in rows):
        columns.append("would fit")
        cells = [(*line, _would_fit(row)) for line, row in zip(cells, rows)]
    lines.append(table_text(columns, cells, width=width).rstrip())
    if equals:
        lines += _folded([f"as fast as {answer.fastest[0].policy}: {', '.join(row.policy for row in equals)}"], width)
    return "\n".join([*lines, *_notes(list(_fit_notes(answer, why=why)), width)]) + "\n"


def fits_said(answer: Fits) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(sentences of the verdict, advised flags, notes)."""
    changes = [] if answer.change is None else [answer.change, *answer.others]
    advice = [f"--policy {row.policy}" for row in answer.fastest[:1]] or [one.words for one in changes]
    return " ".join(_verdict(answer)), tuple(map(as_flags, advice)), tuple(_fit_notes(answer, why=False))


def _part_cells(answer: Fits) -> tuple[list[str], list[tuple[str, ...]]]:
    heads, columns = ["what takes memory", "in all"], [[part.job_bytes for part in answer.parts]]
    if answer.parts[-1].gpu_bytes is not None:
        heads += [f"GPU, {answer.fastest[0].policy}", "host"]
        columns += [[part.gpu_bytes or 0 for part in answer.parts], [part.host_bytes or 0 for part in answer.parts]]
    rows = [(part.name, *sizes) for part, *sizes in zip(answer.parts, *columns)]
    total = ("sum", *(sum(column) for column in columns))
    return heads, [(name, *(format_size(size) if size else "-" for size in sizes)) for name, *sizes in (*rows, total)]


def _by_time(answer: Fits) -> list[Fit]:
    def place(row: Fit) -> tuple[bool, bool, float]:
        return not row.fits, row not in answer.fastest[:1], (row.iteration_s if row.fits else row.short_bytes) or 0.0

    return sorted(answer.rows, key=place)


def _asked(answer: Fits) -> tuple[str, str]:
    w, m = answer.workload, answer.machine
    each = "" if m.world_size == 1 else f" for each of {m.world_size} GPUs"
    parts = [w.model, f"{_params(w.params)} parameters", batch_words(answer), f"sequence {w.sequence}", w.dtype]
    parts += [word for word in (w.notes, w.optimizer.words) if word]
    machine = f"on {m.name}: {_memory(m)}{each}; weights are {_loaded(answer.loading, m, w.tensors)}"
    return ", ".join(parts) + _kernels(w.kernels), machine


def _loaded(loading: Loading, machine: Machine, tensors: Iterable[Tensor] = ()) -> str:
    if loading.way == "in-place":
        return "made in place"
    return f"loaded {loading.words(machine.local_ranks, tensors) or 'whole'}"


def _fit_notes(answer: Fits, *, why: bool) -> Iterator[str]:
    """why: also of each policy that lacks room."""
    known = [(row.policy, row.trust) for row in answer.rows if row.fits]
    yield from sources_of_times(answer.workload, answer.machine, known)
    short = {row.short_of for row in answer.rows if row.short_of is not None}
    yield from (row.reason for row in answer.rows if row.reason is not None and (why or row.short_of is None))
    if short and not why:
        least = "≥, ≤: only what is short was sought; " if any(map(_is_least, answer.rows)) else ""
        yield f"{least}what needs the room, policy by policy: the same command with --why"
    yield from words_of_others(row.policy for row in answer.rows)
    elsewhere = answer.change is None or answer.change.words.startswith("on ")  # no flag of the job helps
    short_of_gpu = short == {"gpu"} and not (answer.any or answer.named) and elsewhere
    notes = unmodelled_notes(answer.workload, answer.machine, {}, short_of_gpu=short_of_gpu)
    yield from (f"{row.policy}: sequences per GPU {row.shares}" for row in answer.rows if row.fits and row.shares)
    machine = answer.machine
    notes = (*notes, *added_gpus_notes(machine), *thread_notes(machine))
    notes = (*notes, *units_notes(machine, answer.workload.compute_dtype))
    notes = (*notes, *attention_notes(machine, answer.workload.attention))
    if any(row.fits and row.host_payload_bytes for row in answer.rows):
        notes = (*notes, *pinned_notes(answer.machine))
    notes = (*notes, *(row.disk_life for row in answer.rows if row.disk_life))
    yield from (f"note: {note}" for note in notes)


def _verdict(answer: Fits) -> list[str]:
    return _yes(answer) if answer.any else _no(answer)


def _yes(answer: Fits) -> list[str]:
    fitting, fast = [row for row in answer.rows if row.fits], answer.fastest
    best, total = fast[0], len(answer.rows)
    under = best.policy if total == 1 else f"{len(fitting)} of the {total} policies"
    undecided = best.loading_short_bytes is not None
    yes = "Yes, if the weights are loaded once per node" if undecided else "Yes"
    said = [f"{yes}: {answer.workload.model} fits on {machine_words(answer.machine)} under {under}."]
    if best.iteration_s is not None:
        belief = "" if best.expected_error is None else f" ({format_error(best.expected_error)})"
        ties = len(fast) - 1
        equals = f" ({ties} {'other is' if ties == 1 else 'others are'} as fast)" if ties else ""
        fastest = f"The fastest is {best.policy}{equals}: it" if total > 1 else "It"
        said[0] += (
            f" {fastest} takes {format_s(best.iteration_s)} per iteration{belief}, {best.tokens_per_s:,.0f} tokens/s."
        )
    gpu = f"{format_size(best.gpu_needed_bytes)} of {format_size(best.gpu_available_bytes)} of GPU memory"
    host = f"{format_size(best.host_needed_bytes)} of {format_size(best.host_available_bytes)} of host memory"
    said.append(f"{best.policy} needs at least {gpu} and {host}{_each(answer.machine)}.")
    said += shown_on_card(best)
    said += [answer.hiding.words] if answer.hiding is not None else []
    if undecided:
        said.append(
            f"No, if every process loads them whole in fp32, as FSDP does by default (--loading {EACH_FP32}): "
            f"{best.policy} then lacks {format_bytes(best.loading_short_bytes or 0)} of host memory per GPU."
        )
    return said


def shown_on_card(row: Fit) -> list[str]:
    """What nvidia-smi will show, where the answer needs a card."""
    if row.gpu_shown_bytes is None or not row.gpu_reserve_bytes:
        return []
    shown, beside = format_size(row.gpu_shown_bytes), format_size(row.gpu_reserve_bytes)
    most = format_size(min(row.gpu_kept_bytes, row.gpu_needed_bytes or 0))
    kept = f"{most} (where they are free) that" if row.gpu_kept_bytes else "what"
    said = (
        f"The card will show at least {shown}: the tensors, {beside} of context and fragments, and {kept} torch keeps."
    )
    return [
        said,
        *(["A part of what torch keeps is in use at the step: this yes is not certain."] if row.is_tight else []),
    ]


def _no(answer: Fits) -> list[str]:
    name, total, change = machine_words(answer.machine), len(answer.rows), answer.change
    under = answer.rows[0].policy if total == 1 else f"any of the {total} policies"
    said = [f"No: {answer.workload.model} does not fit on {name} under {under}."]
    short = [row for row in answer.rows if row.short_bytes is not None]
    helped = [row for row in short if change is not None and row.policy in change.policies]
    least = min(helped or short, key=lambda row: row.short_bytes or 0, default=None)
    if least is None:
        return [*said, f"Why: {answer.rows[0].reason}."]
    who = "it" if total == 1 else f"{least.policy}{'' if helped else ', which lacks least,'}"
    said.append(f"Why: {who} {_lack(least, answer)}.")
    return [*said, *_changes(answer)]


def _changes(answer: Fits) -> list[str]:
    said: list[str] = []
    change = answer.change
    if change is not None:
        said.append(f"Smallest change that makes it fit: {_named_change(change, answer)}.")
        if answer.others:
            instead = "; or ".join(_named_change(one, answer) for one in answer.others)
            said.append(f"With the job as it is: {instead}.")
    elif answer.near:
        said.append("No change that was tried makes it fit.")
    return said


def _named_change(change: SmallestChange, answer: Fits) -> str:
    words, policies = change.words.removeprefix("with ") + brings_words(change.brings_bytes), change.policies
    if words.startswith("--policy") or policies == tuple(row.policy for row in answer.rows):
        return words
    names = policies[0] if len(policies) == 1 else f"{', '.join(policies[:-1])} or {policies[-1]}"
    return f"{words}, under {names}"


def _lack(row: Fit, answer: Fits) -> str:
    needed = {"gpu": row.gpu_needed_bytes, "host": row.host_needed_bytes}.get(row.short_of or "")
    if needed is None:
        return f"lacks {format_bytes(row.short_bytes or 0)} on {row.short_of}"
    machine, ranks = answer.machine, answer.machine.local_ranks
    if row.short_of == "gpu":
        place, available, whole = "GPU", row.gpu_available_bytes, machine.gpu.memory_bytes
        kept, who, shared = whole - available, "the driver and for what the allocator cannot use", ""
    else:
        place, available, whole = "host", row.host_available_bytes, machine.host.memory_bytes
        kept, who = machine.host.reserved_bytes, "the operating system"
        shared = f", {ranks} GPUs share the rest" if ranks > 1 else ""
    besides = f" ({format_bytes(kept)} of {format_bytes(whole)} are kept for {who}{shared})" if kept else ""
    need = f"{format_bytes(needed)} of {place} memory{_each(machine)}"
    short = needed - available
    startup = row.host_startup_bytes or 0
    if row.short_of == "host" and startup >= short:  # in place, the weights would fit
        how = answer.loading.words(ranks, answer.workload.tensors)
        need += f", {format_bytes(startup)} of it for weights while they are loaded{how and f' {how}'}"
    return f"needs {need}, but only {format_bytes(available)} can be used{besides}: {format_bytes(short)} too little"


def _each(machine: Machine) -> str:
    return " per GPU" if machine.data_parallel_size > 1 else ""


def _would_fit(row: Fit) -> str:
    return "; ".join(row.changes) or ("-" if row.short_of is None else "nothing tried helps")


def _fit_cells(row: Fit, *, best: bool, why: bool) -> tuple[str, ...]:
    seconds = "" if row.iteration_s is None else format_s(row.iteration_s)
    at_least = _is_least(row)
    figures = [
        *_needed_and_left(row.gpu_needed_bytes, row.gpu_headroom_bytes, at_least=at_least),
        *_needed_and_left(row.host_needed_bytes, row.host_headroom_bytes, at_least=at_least),
        f"{seconds} {format_error(row.expected_error)}" if seconds and row.expected_error is not None else seconds,
    ]
    if why:
        parts = row.host_rounding_bytes, row.host_startup_bytes, row.host_buffer_bytes
        figures += [format_size(part) for part in parts]
    fits = "best" if best else "yes" if row.fits else f"no: {row.short_of}" if row.short_of else "no"
    return (row.policy, fits, *(figure or "-" for figure in figures))


def _is_least(row: Fit) -> bool:
    return not row.fits and (row.gpu_needed_bytes is None) != (row.host_needed_bytes is None)


def _needed_and_left(needed: int | None, left: int | None, *, at_least: bool) -> tuple[str, str]:
    if needed is None or not at_least:
        return format_size(needed), format_size(left)
    return f"≥ {format_size(needed)}", f"≤ {format_size(left)}"


def limits_said(answer: Limits) -> tuple[str, tuple[str, ...]]:
    """Returns the largest, in a sentence, and the notes."""
    best = max(answer.rows, key=lambda row: row.value, default=None)
    if best is None or not best.value:
        return "; ".join(row.reason for row in answer.rows if row.reason), tuple(_limit_notes(answer))
    size = "" if best.params is None else f", {format_params(best.params)} parameters"
    return f"{best.policy}: {answer.what} {best.value}{size}", tuple(_limit_notes(answer))


def _limit_notes(answer: Limits) -> list[str]:
    m = answer.machine
    alone = [UNMODELLED] if m.data_parallel_size > 1 and "parallel" not in answer.job else []
    return [*alone, *added_gpus_notes(m), *thread_notes(m)]


def limits_text(answer: Limits, *, width: int | None = None) -> str:
    """One line per policy."""
    width = terminal_width() if width is None else width
    m = answer.machine
    each = "" if m.world_size == 1 else f" for each of {m.world_size} GPUs"
    lines = [
        f"largest {'depth' if answer.what == 'layers' else 'batch'}: {answer.of}",
        f"on {m.name}: {_memory(m)}{each}; weights are {_loaded(loading_of(str(answer.job['loading'])), m)}",
    ]
    if answer.most_params is not None:
        hosts = "their host" if m.nodes == 1 else f"their {m.nodes} hosts"
        who = "the GPU and its host" if m.world_size == 1 else f"{m.world_size} GPUs and {hosts}"
        room = format_bytes((m.gpu_budget_bytes + m.host_budget_bytes) * m.world_size)
        most = f"{_params(answer.most_params)} parameters" + " without disks" * (m.nvme is not None)
        lines.append(f"{who} hold {room} in all, enough for at most {most}")
    lines = [*_folded(lines, width), ""]
    published = published_limits(m) if answer.what == "layers" else ()
    if answer.what == "layers":
        columns, rows = _depths(answer.rows, published)
    else:
        columns = ["policy", "batch", "then short of"]
        rows = [[row.policy, str(row.value), _short(row)] for row in answer.rows]
    lines.append(table_text(columns, rows, width=width).rstrip())
    if published:
        texts = [f"{p.system} {_params(p.params)}: {p.source}" for p in published]
        lines += _notes(["published: " + "; ".join(texts)], width)
    untold = (row.reason for row in answer.rows if row.reason and (row.value == 0 or row.short_of is None))
    lines += _notes([*dict.fromkeys(untold)], width)
    lines += _notes([f"note: {note}" for note in _limit_notes(answer)], width)
    return "\n".join(lines) + "\n"


def _depths(limits: Sequence[Limit], published: Sequence[PublishedLimit]) -> tuple[list[str], list[list[str]]]:
    columns = ["policy", "layers", "parameters", "of the catalog", "then short of"]
    rows = [_depth_cells(row) for row in limits]
    if published:
        columns.insert(4, "published")
        for cells, row in zip(rows, limits):
            mine = [f"{_params(p.params)} ({p.system})" for p in published if p.policy == row.policy]
            cells.insert(4, ", ".join(mine))
    return columns, rows


def _depth_cells(row: Limit) -> list[str]:
    known = "" if row.catalog_model is None else f"{row.catalog_model} ({_params(row.catalog_params)})"
    return [row.policy, str(row.value), _params(row.params), known, _short(row)]


def _short(row: Limit) -> str:
    return "" if row.short_bytes is None else f"{format_size(row.short_bytes)} of {row.short_of}"


def _tokens(count: float) -> str:
    return f"{count / 1e9:,.4g} billion" if count >= 1e9 else f"{count:,.0f}"


def cheapest_text(answer: Cheapest, *, width: int | None = None) -> str:
    """Offers in time come first, the cheapest first."""
    width = terminal_width() if width is None else width
    by = "" if answer.deadline_s is None else f" in {_deadline(answer.deadline_s)}"
    job = replace(answer.job, kernels=None)
    kernels = _kernels(answer.job.flavour)
    what = ", ".join((answer.model, f"batch {job.batch}", f"sequence {job.seq}", *job.words)) + kernels
    lines = [*wrap(f"{what}, on {_tokens(answer.tokens)} tokens{by}", width), ""]
    columns = (
        "machine", "nodes", "GPUs", "in time", "policy", "micro-batches", "tokens/s", "error", "TFLOPS/GPU", "MFU",
        "days", "USD/h", "USD", "USD/M tokens",
    )  # fmt: skip
    shown = [row for row in answer.rows if row.days is not None or row.least_usd is not None]
    if answer.best is not None or answer.too_late:
        lines += [*wrap(_cheapest_one(answer), width), *([""] if shown else [])]
    if shown:
        lines.append(table_text(columns, [_offer_cells(row) for row in shown], width=width).rstrip())
    elif not answer.too_late:
        lines += wrap("no machine can train it", width)
    lines += _notes(list(_offer_notes(answer, shown)), width)
    return "\n".join(lines) + "\n"


def cheapest_said(answer: Cheapest) -> tuple[str, tuple[str, ...]]:
    """(the cheapest offer or why there is none, notes)."""
    notes = tuple(_offer_notes(answer, [row for row in answer.rows if row.days is not None]))
    return _cheapest_one(answer), notes


def _cheapest_one(answer: Cheapest) -> str:
    best = answer.best
    if best is not None:
        sure = next((row for row in answer.rows if row.in_time and row.in_time_is_sure), best)
        safer = "" if sure is best else f"; in time whatever the error: {_offered(sure)}"
        first = "cheapest" if best.usd is not None else "cheapest at any price" if answer.alike else "fastest"
        return f"{first}: {_offered(best)}{safer}"
    if not answer.too_late:
        return "no machine can train it"
    nearest = min(answer.rows, key=lambda row: row.days or row.least_days or float("inf"))
    return f"none in time; the nearest is {_nearest(nearest)}"


def _offered(offer: Offer) -> str:
    price = "no price known" if offer.usd is None else f"{offer.usd:,.0f} USD"
    nodes = f"{offer.nodes} node{'s'[: offer.nodes > 1]} of {offer.machine}"
    return f"{nodes} under {offer.policy}: {_days(offer.days or 0.0)} days, {price}"


def _offer_notes(answer: Cheapest, shown: Sequence[Offer]) -> Iterator[str]:
    slow = [row for row in answer.rows if row.days is None and row.least_usd is None and row.least_days is not None]
    if any(row.least_usd is not None for row in answer.rows):
        yield "≥: left out, as closed forms and estimates of its ways are not below the cheapest"
    if slow:
        days = ", ".join(f"{_tried(row)} {_days(row.least_days or 0.0)}" for row in slow)
        yield f"too slow, by their days if they never waited for anything: {days}"
    yield from (f"{_tried(row)}: {row.reason}" for row in answer.rows if row.reason is not None and row not in slow)
    if shown:
        prices = dict.fromkeys(f"{row.machine}: {row.price_of}" for row in shown)
        yield f"prices of a node: {'; '.join(prices)}"
        yield "MFU: flops of forward and backward pass, without what is recomputed, over the peak of the datasheet"
        yield "micro-batches: sequences of all GPUs at a time x how many per iteration"
        if not all(row.in_time_is_sure for row in shown if row.least_usd is None):
            yield "likely, unlikely: the deadline is nearer to the days than their error, and may be missed or met"
        unknown = [(_nodes_of(row), row.trust) for row in shown if row.trust is not None and NOT_NEAR in row.trust]
        yield from (f"error of {line}" for line in trust_lines(unknown))
    if any(row.gpus > 1 for row in answer.rows) and not any(row.parallel for row in answer.rows):
        yield f"note: {_DATA_PARALLEL}"


def _nearest(offer: Offer) -> str:
    days = offer.days or offer.least_days or 0.0
    least = "" if offer.days is not None else "at least "
    nodes = "" if offer.tried == (1,) else f" with {offer.nodes} node{'s'[: offer.nodes > 1]}"
    tried = "" if len(offer.tried) < 2 else f" ({', '.join(map(str, offer.tried))} nodes were tried)"
    return f"{offer.machine}{nodes}, {least}{_days(days)} days{tried}"


def _deadline(time_s: float) -> str:
    for unit, unit_s in (("days", 86400), ("h", 3600), ("min", 60)):
        if time_s >= unit_s:
            return f"{time_s / unit_s:g} {unit}"
    return f"{time_s:g} s"


def _dollars(usd: float) -> str:
    return f"{usd:,.2f}" if usd >= 1 else f"{usd:#.3g}"


def _days(days: float) -> str:
    return f"{days:,.1f}" if days >= 1 else f"{days:.2g}"


def _tried(row: Offer) -> str:
    return _nodes_of(row) if len(row.tried) < 2 else f"{row.machine}, {row.tried[0]} to {row.tried[-1]} nodes"


def _nodes_of(row: Offer) -> str:
    return row.machine if row.nodes == 1 else f"{row.machine}, {row.nodes} nodes"


_IN_TIME = {(True, True): "yes", (True, False): "likely", (False, False): "unlikely", (False, True): "no"}


def _at_least(figure: float | None, least: float | None, text: Callable[[float], str]) -> str:
    if figure is not None:
        return text(figure)
    return "" if least is None else f"≥ {text(least)}"


def _offer_cells(row: Offer) -> tuple[str, ...]:
    return (
        row.machine,
        str(row.nodes),
        str(row.gpus),
        _IN_TIME[bool(row.in_time), row.in_time_is_sure] if row.least_usd is None else "",
        ", ".join(filter(None, (row.policy, row.parallel, row.recompute and f"recomputing {row.recompute}"))),
        "" if row.batch is None else f"{row.batch} x {row.micro_batches}",
        "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        format_error(row.expected_error) if row.least_usd is None else "",
        ""
        if row.tflops_per_gpu is None
        else f"{row.tflops_per_gpu:.0f}"
        if row.tflops_per_gpu >= 100
        else f"{row.tflops_per_gpu:.1f}",
        "" if row.mfu is None else format_percent(row.mfu),
        _at_least(row.days, row.least_days, _days),
        "" if row.usd_per_hour is None else f"{row.usd_per_hour:,.2f}",
        _at_least(row.usd, row.least_usd, "{:,.0f}".format),
        "" if row.usd_per_million_tokens is None else _dollars(row.usd_per_million_tokens),
    )


def sensitivity_text(answer: Sensitivity, *, width: int | None = None) -> str:
    """One line per part: the effect of a better one."""
    width = terminal_width() if width is None else width
    w = answer.workload
    by = f"{answer.by * 100:+g} %"
    what = f"{by} of each part of {answer.machine.name}: {w.model}, {batch_words(answer)}, sequence {w.sequence}"
    what += "".join(f", {words}" for words in (w.notes, w.optimizer.words) if words)
    lines = [*wrap(what + _kernels(w.kernels), width), ""]
    columns = ("part", "iteration", "change", "policy", "largest model", "layers", "change ")
    rows = [_effect_cells("as it is", answer.now)]
    for row in answer.rows:
        each = ", change per token" if row.part == "one more GPU" else ""
        rows.append(_effect_cells(f"{row.part}{each}", row))
    lines.append(table_text(columns, rows, width=width).rstrip())
    known = dict.fromkeys((r.policy, r.trust) for r in (answer.now, *answer.rows) if r.policy is not None)
    times = sources_of_times(w, answer.machine, list(known))
    tried = f"tried: {', '.join(answer.policies)}"
    if "optimal" not in answer.policies:
        tried += "; optimal, which may be faster, was left out for speed: --policy optimal asks for it"
    kept = [_kept_text(row, answer.now) for row in answer.rows]
    hint = "`pstar fits` with the same flags says what would do"
    short = [*answer.short, hint] if answer.short else []
    lines += _notes([*times, tried, *(text for text in kept if text), *short], width)
    return "\n".join(lines) + "\n"


def _kept_text(row: PartEffect, now: PartEffect) -> str:
    """A plan for the better part would be slower: the present one's time is shown."""
    from pstar_sim.planner.sensitivity import PLANNED, REPLAYED

    if row.how == PLANNED or now.iteration_s is None:
        return ""
    made = "no policy plans for it"
    if row.planned_s is not None:
        if row.planned_s <= now.iteration_s:
            return ""
        worse = (row.planned_s / now.iteration_s - 1) * 100
        made = f"a plan made for the better part takes {format_s(row.planned_s)}, {worse:.2g} % more"
    if row.how == REPLAYED:
        return f"{row.part}: the time is that of the plan as it is, run with the better part; {made}"
    return (
        f"{row.part}: a better part can be run as the old one was, so nothing is lost; {made} (where copies and CPU "
        "Adam share the host's DRAM bandwidth, faster copies slow Adam)"
    )


def _effect_cells(name: str, row: PartEffect) -> tuple[str, ...]:
    return (
        name,
        "does not fit" if row.iteration_s is None else format_s(row.iteration_s),
        "" if row.change is None else format_barred(row.change, row.change_error),
        row.policy or "",
        _params(row.params),
        "" if row.layers is None else str(row.layers),
        "" if row.more_layers is None else f"{row.more_layers:+d}",
    )
