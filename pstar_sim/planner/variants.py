"""Variants: of the ways to run one global batch that a trace file holds, the fastest.

A trace may hold a model at several batch sizes, with and without recomputation of activations. Each that divides a
rank's share of the global batch is repeated as micro-batches until it is reached; every candidate then does the same
work, so the shortest iteration wins. Candidates whose computing alone takes longer than the best plan so far are not
planned. Where a batch is there with and without recomputation, the last blocks may also keep their activations while
the others recompute theirs (workload/mixing.py). What a file cannot say (which bytes would move to the host and back)
is named in the answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import DoesNotFit, TraceError
from pstar_sim.planner.compare import plan_and_play
from pstar_sim.policy.registry import find_policy
from pstar_sim.units import format_s
from pstar_sim.workload.mixing import block_names, mix_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

__all__ = ["MOST_MICRO_BATCHES", "Chosen", "candidates", "choose", "words"]

MOST_MICRO_BATCHES = 256  # more make plans of hundreds of thousands of steps


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """workload: the variant to run, one rank's share. iteration_s: of its plan by `policy`. tried: what was looked at,
    in words -> its seconds or why not. left_out: what was not considered, and why."""

    workload: Workload
    policy: str
    plan: Plan
    iteration_s: float
    tried: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]

    def choices(self) -> dict[str, object]:
        """For `Plan.choices`: what was chosen among what."""
        return {"variant": words(self.workload), "variants_tried": dict(self.tried), "not_considered": self.left_out}


def words(w: Workload) -> str:
    """A variant in words: "2 micro-batches of 8, activations recomputed"."""
    batches = f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''} of {w.batch}"
    kept = "recomputed" if w.checkpointing else "kept"
    mixed = f", but {w.notes}" if _is_mixed(w) else ""
    return f"{batches}, activations {kept}{mixed}"


def candidates(variants: Sequence[Workload], share: int) -> tuple[Workload, ...]:
    """One rank's workloads of `share` sequences an iteration that the variants of one model lead to, no two alike.

    A variant with one micro-batch is repeated; one with several is taken as it is. Raises TraceError where none
    divides the share (naming the batches there are), and for variants of different models, types or sequence lengths.
    """
    if not variants:
        raise TraceError("there are no variants to choose from")
    first = variants[0]
    for w in variants:
        if (w.fingerprint, w.sequence) != (first.fingerprint, first.sequence):
            raise TraceError(
                f"variants are of {first.model} ({first.dtype}, sequence {first.sequence}) and {w.model} ({w.dtype}, "
                f"sequence {w.sequence}); a global batch is one of them: name it by --dtype or --seq"
            )
    found: dict[tuple[int, int, bool, str, str], Workload] = {}
    for w in (*variants, *_mixed(variants)):
        repeats, rest = divmod(share, w.batch * w.micro_batches)
        if rest or not repeats or (w.micro_batches > 1 and repeats > 1):
            continue
        if repeats * w.micro_batches <= MOST_MICRO_BATCHES:
            made = repeat_micro_batch(w, repeats) if repeats > 1 else w
            note = made.notes if _is_mixed(made) else ""
            found.setdefault((made.batch, made.micro_batches, made.checkpointing, made.attention, note), made)
    if not found:
        sizes = sorted({w.batch * w.micro_batches for w in variants})
        raise TraceError(
            f"a rank's share of the global batch is {share} sequences; the trace holds micro-batches of "
            f"{', '.join(map(str, sizes))}, none of which divides it (in at most {MOST_MICRO_BATCHES} micro-batches)"
        )
    return tuple(found.values())


def _is_mixed(w: Workload) -> bool:
    return w.checkpointing and w.notes.startswith("blocks ")


def _mixed(variants: Sequence[Workload]) -> list[Workload]:
    """Where a batch is there with and without recomputation: the last quarter, half and three quarters of the blocks,
    whose activations are needed first, keep theirs."""
    out: list[Workload] = []
    for w in variants:
        if not w.checkpointing or w.micro_batches > 1:
            continue
        same = (w.batch, w.attention, w.dtype, 1, False)
        for other in variants:
            if (other.batch, other.attention, other.dtype, other.micro_batches, other.checkpointing) != same:
                continue
            blocks = block_names(w)
            for quarters in (1, 2, 3):
                keep = blocks[len(blocks) - len(blocks) * quarters // 4 :]
                if not keep or len(keep) == len(blocks):
                    continue
                with contextlib.suppress(TraceError):  # no stack of equal blocks: there is nothing to mix
                    out.append(mix_blocks(w, other, keep))
            break
    return out


def choose(workloads: Sequence[Workload], machine: Machine, settings: Settings, *, policy: str = "optimal") -> Chosen:
    """The fastest of `workloads` (each one rank's whole share of the same batch) by `policy`.

    Raises DoesNotFit, of the candidate that lacks least, if none fits; TraceError if they are not the same work.
    """
    if len({w.batch * w.micro_batches for w in workloads}) != 1:
        raise TraceError("the workloads are of different global batches; their iterations cannot be compared")
    function = find_policy(policy)
    least = {id(w): sum(CostModel(w, machine, build_layout(w)).moments_s) for w in workloads}
    order = sorted(workloads, key=lambda w: (least[id(w)], w.micro_batches))
    tried: list[tuple[str, str]] = []
    best: tuple[float, Plan] | None = None
    shortest: DoesNotFit | None = None
    for w in order:
        if best is not None and least[id(w)] >= best[0]:
            tried.append((words(w), f"not planned: computing alone takes {format_s(least[id(w)])}"))
            continue
        try:
            plan, timeline = plan_and_play(function, w, machine, settings)
        except DoesNotFit as error:
            tried.append((words(w), f"does not fit: short by {error.short_bytes} bytes of the {error.place}"))
            if shortest is None or error.short_bytes < shortest.short_bytes:
                shortest = error
            continue
        tried.append((words(w), format_s(timeline.iteration_s)))
        if best is None or timeline.iteration_s < best[0]:
            best = (timeline.iteration_s, plan)
    if best is None:
        assert shortest is not None
        raise shortest
    left_out = _left_out(workloads)
    chosen = Chosen(
        workload=best[1].workload,
        policy=policy,
        plan=best[1],
        iteration_s=best[0],
        tried=tuple(tried),
        left_out=left_out,
    )
    return replace(chosen, plan=replace(best[1], choices={**best[1].choices, **chosen.choices()}))


def _left_out(workloads: Sequence[Workload]) -> tuple[str, ...]:
    known = {w.checkpointing for w in workloads}
    out = ["activations moved to the host and back: the trace does not say which bytes are whose"]
    if len(known) == 1:
        other = "kept" if known == {True} else "recomputed"
        out.append(f"activations {other}: the trace holds no such variant")
    else:
        some = "activations of some blocks kept and of others recomputed"
        out.append(
            f"{some}: other sets of blocks than the last quarter, half and three quarters"
            if any(map(_is_mixed, workloads))
            else f"{some}: the variants are no stacks of the same blocks"
        )
    return tuple(out)
