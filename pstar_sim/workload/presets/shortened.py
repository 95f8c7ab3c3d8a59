"""Parts of models written with few of their alike layers, for closed forms.

[Note: alike layers] Behind the first, which border or embedding may change, layers come in a period: two are written,
and what fills none. Moments of the first forward, of the second backward, come again, as what joins them is alike. Not
under autocast, whose copies end together, nor with adapters by a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from pstar_sim.catalog.model_shapes import ModelEntry, model_entry
from pstar_sim.python310 import Unpack
from pstar_sim.workload.adapter import adapter
from pstar_sim.workload.axes import Axes, AxesGiven
from pstar_sim.workload.lora import in_all_layers
from pstar_sim.workload.mixing import block_of, block_runs, shifted
from pstar_sim.workload.presets import axes_of_variant, kinds_of_layers, taped_stage
from pstar_sim.workload.presets.shared import Stage, period_of
from pstar_sim.workload.tape import Crossing
from pstar_sim.workload.workload import Moment, Tensor, Workload

_Figure = TypeVar("_Figure")
_NONE = range(0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Written:
    """ahead, behind: moments of the period that comes again.
    summed_bytes: its own, in the step.
    """

    workload: Workload
    crossings: Sequence[Crossing]
    ahead: range = _NONE
    behind: range = _NONE
    summed_bytes: int = 0
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Shortened:
    """One micro-batch ([Note: alike layers]).

    more: times that the period comes again.
    """

    written: _Written
    more: int

    def each(self, figures: Sequence[_Figure]) -> list[_Figure]:
        """For all moments, of those written."""
        own = self.written
        found: list[_Figure] = []
        for begin, run in ((0, own.ahead), (own.ahead.stop, own.behind)):
            found += [*figures[begin : run.stop], *self.more * list(figures[run.start : run.stop])]
        return [*found, *figures[own.behind.stop :]]

    @cached_property
    def moments(self) -> list[Moment]:
        own, (*body, step) = self.written, self.written.workload.moments
        kept = body[own.ahead[-1]].end_bytes - body[own.ahead[0]].start_bytes if self.more else 0
        shifts = [0] * own.ahead.stop
        shifts += [kept * n for n in range(1, self.more + 1) for _ in own.ahead]
        shifts += [kept * self.more] * (own.behind.stop - own.ahead.stop)
        shifts += [kept * n for n in reversed(range(self.more)) for _ in own.behind]
        shifts += [0] * (len(body) - own.behind.stop)
        moments = [shifted(moment, shift) for moment, shift in zip(self.each(body), shifts, strict=True)]
        more_bytes = self.more * own.summed_bytes
        summed = tuple((what, by, size + more_bytes) for what, by, size in step.collectives)
        return [*moments, replace(step, collectives=summed)]

    @cached_property
    def crossings(self) -> list[Crossing]:
        own = self.written
        return [
            crossing._replace(
                moment=crossing.moment
                + self.more * len(own.ahead) * (crossing.moment >= own.ahead.stop)
                + self.more * len(own.behind) * (crossing.moment >= own.behind.stop)
            )
            for crossing in own.crossings
        ]

    def total(self, of: Callable[[Sequence[Tensor]], int]) -> int:
        """Of all tensors."""
        return of(self.written.workload.tensors) + self.more * of(self.written.tensors)

    @cached_property
    def model_bytes(self) -> int:
        """Weights and states."""
        states_of = self.written.workload.states_of
        return self.total(lambda ts: sum(t.bytes for t in ts if t.tied_to is None) + states_of(ts)[1])


def shortened(entry: ModelEntry, stage: Stage, *, batch: int, sequence: int, **given: Unpack[AxesGiven]) -> Shortened:
    """As `stage_of`. Raises ModelError."""
    axes = Axes(**given)
    kinds: tuple[object, ...] = kinds_of_layers(entry, axes)
    if axes.lora is not None and not in_all_layers(adapter(axes.lora)):
        kinds = tuple(enumerate(kinds))
    own = kinds[stage.layers.start : stage.layers.stop]
    lead, period = (0, 0) if axes.autocast else period_of(own)
    count = lead + 2 * period + (len(own) - lead) % period if period else len(own)
    begin = next(n for n in range(len(kinds)) if kinds[n : n + count] == own[:count])
    few = replace(stage, layers=range(begin, begin + count))
    written = _written(entry, few, axes, lead, period, batch=batch, sequence=sequence)
    return Shortened(written=written, more=(len(own) - count) // period if period else 0)


def shortened_variant(
    workload: Workload,
    *,
    shape: ModelEntry | None = None,
    batch: int | None = None,
    micro_batches: int | None = None,
    **changes: Unpack[AxesGiven],
) -> Shortened:
    """One micro-batch of `variant`'s."""
    entry, axes = shape or model_entry(workload.model), axes_of_variant(workload, **changes)
    whole = Stage(layers=range(entry.layers))
    made = shortened(entry, whole, batch=batch or workload.batch, sequence=workload.sequence, **axes.given)
    few = replace(made.written.workload, optimizer=workload.optimizer)
    return replace(made, written=replace(made.written, workload=few))


@lru_cache(maxsize=256)
def _written(
    entry: ModelEntry, stage: Stage, axes: Axes, lead: int, period: int, *, batch: int, sequence: int
) -> _Written:
    workload, tape = taped_stage(entry, stage, batch=batch, sequence=sequence, **axes.given)
    if not period:
        return _Written(workload=workload, crossings=tape.crossings)
    runs = [(block, forward, run) for block, forward, run in block_runs(workload) if block is not None]
    ahead = [(block, run) for block, forward, run in runs if forward][lead : lead + period]
    back = [run for _, forward, run in runs if not forward][::-1][lead + period : lead + 2 * period]
    behind = range(back[-1].start, back[0].stop)
    return _Written(
        workload=workload,
        crossings=tape.crossings,
        ahead=range(ahead[0][1].start, ahead[-1][1].stop),
        behind=behind,
        summed_bytes=sum(size for moment, size in tape.summed.items() if moment in behind),
        tensors=_of_blocks(workload.tensors, {block for block, _ in ahead}),
    )


def _of_blocks(tensors: Iterable[Tensor], blocks: set[str | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if block_of(tensor.name) in blocks]
