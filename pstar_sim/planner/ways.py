"""Ways: the ways to run one global batch, each known before its workload is written down.

A way is one or two variants of a model, a treatment of each block's activations, a number of micro-batches and an
order: enough for the time of computing and stashes and a bound for every plan.

[Note: which blocks] The last blocks keep their activations, as their backward pass comes first; the first recompute or
are offloaded: theirs leaves most time. A quarter, half or three quarters of the blocks are tried, for offloading also
all but the last two, or every second, fourth or eighth, with the time of as many blocks on the link. Of the others
none, the first half or all recompute. The very first is not offloaded: the forward often holds its input (the
embeddings).

[Note: stand-ins] A workload of one or three micro-batches bounds one of more. If micro-batches follow one another, the
moment in which a micro-batch (of three the middle one) turns to its backward lasts longer by those left out, without
their copies and adds: first reads are still in the first, last gradients in the last, and every moment has its room. In
layer-major order, one micro-batch with moments as many times longer stands for all: a block's first read is no later
and its last gradient no earlier in the whole, and the tide no lower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from pstar_sim.bounds.stash_bound import stash_bound_s
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.layout import Layout, build_layout
from pstar_sim.cost import CostModel
from pstar_sim.errors import CannotPlan, TraceError
from pstar_sim.policy.kit.iteration_order import ORDERS, in_order
from pstar_sim.workload.mixing import block_names, block_runs, mix_blocks, offload_blocks, stashes_of
from pstar_sim.workload.orders import Order
from pstar_sim.workload.workload import Phase, Stash, Workload, activations_text, repeat_micro_batch

MOST_MICRO_BATCHES = 256  # more micro-batches make plans of hundreds of thousands of steps
OWN, RELAY, RELAY_HOST = ORDERS
STAND_INS = (1, 3)  # numbers of micro-batches that stand for larger numbers, whose bound takes far longer


class Way:
    """batch: sequences per micro-batch.
    activations, checkpointing: as in the workload.
    stashes: of one micro-batch, in moments of the variant that keeps activations.
    """

    def __init__(
        self,
        one: Workload,
        *,
        kept: Workload | None = None,
        keep: Sequence[str] = (),
        stashes: Sequence[Stash] = (),
        repeats: int = 1,
        order: str = OWN,
    ) -> None:
        """one: the variant that is repeated, or whose blocks recompute.

        kept: where the blocks `keep` come from.
        stashes: of offloaded blocks, which keep their activations in `one` or are in `keep`.
        """
        self._one, self._kept, self._keep = one, kept, frozenset(keep)
        self.stashes, self.repeats, self.relay = tuple(stashes), repeats, order
        self.batch, self.attention, self.recompute = one.batch, one.attention, one.recompute
        self.micro_batches = one.micro_batches * repeats
        self.order = one.order if order == OWN else Order.LAYER_MAJOR
        self.boundaries_on_host = one.boundaries_on_host or order == RELAY_HOST
        self._repeated: dict[int, Workload] = {}  # number of micro-batches -> the workload with them

    @property
    def source(self) -> Workload:
        """Of two variants, that whose blocks recompute."""
        return self._one

    @cached_property
    def checkpointing(self) -> bool:
        if self._kept is None:
            return self._one.checkpointing
        return any(block not in self._keep for block in block_names(self._one))

    @cached_property
    def activations(self) -> tuple[tuple[str, str], ...]:
        offloaded = {stash.block for stash in self.stashes}
        if self._kept is None and not offloaded:
            return self._one.activations
        usual = "recompute" if self._one.checkpointing else "keep"
        how = {block: "keep" if block in self._keep else usual for block in _blocks(self._one)}
        if not offloaded and len(set(how.values())) == 1:
            return ()
        return tuple((block, "offload" if block in offloaded else chosen) for block, chosen in how.items())

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two ways of running the same workload."""
        return (self.batch, self.micro_batches, self.checkpointing, self.attention, self.activations)

    @property
    def stash_bytes(self) -> int:
        """Of an iteration, without boundaries on the host."""
        if self.repeats == 1 and not self.stashes:
            return sum(stash.bytes for stash in self._one.stashes)
        return self.repeats * sum(stash.bytes for stash in self.stashes)

    def repeated(self, repeats: int) -> Way:
        return self if repeats == 1 else self._with(repeats, self.relay)

    def in_order(self, order: str) -> Way:
        return self._with(self.repeats, order)

    def _with(self, repeats: int, order: str) -> Way:
        keep = tuple(self._keep)
        return Way(self._one, kept=self._kept, keep=keep, stashes=self.stashes, repeats=repeats, order=order)

    @cached_property
    def micro_batch(self) -> Workload:
        w = self._one if self._kept is None else mix_blocks(self._one, self._kept, self._keep)
        return offload_blocks(w, [stash.block for stash in self.stashes]) if self.stashes else w

    @cached_property
    def workload(self) -> Workload:
        return in_order("a way", self._of(self.repeats), self.relay)

    def _of(self, repeats: int) -> Workload:
        if repeats not in self._repeated:
            one = self.micro_batch
            self._repeated[repeats] = repeat_micro_batch(one, repeats) if repeats > 1 else one
        return self._repeated[repeats]

    def compute_s(self, machine: Machine, chunk_bytes: int) -> float:
        """With the link to themselves: [Note: the bound of stashes] in bounds/stash_bound.py, run by run of moments
        (waits are at their ends); of computing alone with boundaries on the host."""
        variants = tuple(_seconds_of(w, machine, chunk_bytes) for w in (self._one, self._kept or self._one))
        if self.repeats == 1 and self._kept is None and not self.stashes:
            return variants[0].stash_bound_s
        runs = [
            (block, forward, variants[block in self._keep].runs_s[n])
            for n, (block, forward) in enumerate(variants[0].runs)
        ]
        step_s = variants[0].step_s
        body_s = sum(seconds for _, _, seconds in runs) - step_s
        if not self.stashes:
            return self.repeats * body_s + step_s
        cost = variants[0].cost
        copies = {s.block: (cost.transfer_s(s.bytes, "d2h"), cost.transfer_s(s.bytes, "h2d")) for s in self.stashes}
        until = _blocks_that_give_time(self._kept or self._one, self.stashes)
        link = _StashLink(copies, {other: block for block, other in until.items()})
        clock = 0.0
        for _ in range(self.repeats):
            for before, (block, forward, seconds), behind in zip([_NONE, *runs], runs, [*runs[1:], _NONE]):
                clock = max(clock, link.waits_s(before, block, forward)) + seconds
                link.send(clock, block, forward, behind)
            clock -= step_s
        return clock + step_s

    def stand_ins(self) -> tuple[int, ...]:
        """Micro-batches that stand for the workload, ascending; the last is its own."""
        if self.relay != OWN and self.repeats > 1:
            return (1, self.repeats)
        return (*(n for n in STAND_INS if n < self.repeats), self.repeats)

    def stand_in(self, count: int) -> Workload:
        """By [Note: stand-ins]; for the way's own number, its workload."""
        return self.workload if count == self.repeats else self._of(count)

    def costs(self, count: int, machine: Machine, layout: Layout) -> Sequence[CostModel] | None:
        """Of the stand-in; None for the way's own `count`, and on several GPUs."""
        if count == self.repeats:
            return None
        left_out, evenly = self.repeats - count, self.relay != OWN
        return [_Longer(self.stand_in(count), machine, layout, left_out=left_out, evenly=evenly)]


_Run = tuple[str | None, bool, float]  # block, whether it is its forward pass, seconds
_NONE: _Run = (None, False, 0.0)


class _StashLink:
    """copies: block -> seconds out and in.
    ends: block -> the offloaded block whose time to leave and come back ends with it.
    """

    def __init__(self, copies: Mapping[str, tuple[float, float]], ends: Mapping[str, str]) -> None:
        self.copies, self.ends = copies, ends
        self._out_s: dict[str, float] = {}
        self._in_s: dict[str, float] = {}
        self._down = self._up = 0.0

    def waits_s(self, before: _Run, block: str | None, forward: bool) -> float:
        waits = 0.0
        if before[1] and before[0] is not None and before[0] in self.ends:
            waits = self._out_s[self.ends[before[0]]]
        if not forward and block is not None and block in self.copies:
            waits = max(waits, self._in_s[block])
        return waits

    def send(self, clock: float, block: str | None, forward: bool, behind: _Run) -> None:
        if forward and block is not None and block in self.copies:
            self._down = self._out_s[block] = max(clock, self._down) + self.copies[block][0]
        if not behind[1] and behind[0] is not None and behind[0] in self.ends:
            stashed = self.ends[behind[0]]
            self._up = self._in_s[stashed] = max(clock, self._up, self._out_s[stashed]) + self.copies[stashed][1]


class _Longer(CostModel):
    """left_out: micro-batches that the stand-in does not have.
    evenly: all moments last longer, not the turn alone.
    """

    def __init__(self, workload: Workload, machine: Machine, layout: Layout, *, left_out: int, evenly: bool) -> None:
        super().__init__(workload, machine, layout)
        self._left_out, self._evenly = left_out, evenly

    @cached_property
    def moments_s(self) -> tuple[float, ...]:
        seconds, moments = list(CostModel(self.workload, self.machine, self.layout).moments_s), self.workload.moments
        if self._evenly:
            return (*(s * (1 + self._left_out) for s in seconds[:-1]), seconds[-1])
        middle = self.workload.micro_batches // 2
        mine = [m for m, moment in enumerate(moments[:-1]) if moment.micro_batch == middle]
        turn = next((m for m in mine if moments[m].phase is not Phase.FWD), mine[-1] + 1) - 1
        seconds[turn] += self._left_out * sum(seconds[m] for m in mine)
        return tuple(seconds)


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    cost: CostModel
    runs: Sequence[tuple[str | None, bool]]
    runs_s: Sequence[float]
    step_s: float
    stash_bound_s: float


def _seconds_of(w: Workload, machine: Machine, chunk_bytes: int) -> _Seconds:
    key = ("seconds of runs",)
    known = w.derived.get(key)
    if isinstance(known, _Seconds) and known.cost.machine is machine:
        return known
    cost = CostModel(w, machine, build_layout(w, chunk_bytes=chunk_bytes, ranks=machine.data_parallel_size))
    runs = block_runs(w)
    w.derived[key] = known = _Seconds(
        cost=cost,
        runs=[run[:2] for run in runs],
        runs_s=[sum(cost.moments_s[moments.start : moments.stop]) for _, _, moments in runs],
        step_s=cost.moments_s[-1],
        stash_bound_s=stash_bound_s(w, cost),
    )
    return known


def _blocks(w: Workload) -> list[str]:
    key = ("blocks",)
    known = w.derived.get(key)
    if not isinstance(known, list):
        w.derived[key] = known = block_names(w)
    return known


def _blocks_that_give_time(w: Workload, stashes: Sequence[Stash]) -> Mapping[str, str]:
    """Offloaded block -> block after whose forward its bytes no longer count."""
    behind = {moments.stop: block for block, forward, moments in block_runs(w) if block is not None and forward}
    return {stash.block: behind[stash.gone] for stash in stashes}


def words(w: Way | Workload, among: Sequence[Way | Workload] = ()) -> str:
    """Such as "2 micro-batches of 8, activations recomputed", with "flash attention" where it differs."""
    batches = f"{w.micro_batches} micro-batch{'es' if w.micro_batches > 1 else ''} of {w.batch}"
    kernel = f", {w.attention} attention" if any(other.attention != w.attention for other in among) else ""
    order = w.order.words + (" with the boundaries on the host" if w.boundaries_on_host else "")
    return f"{batches}{order}, {activations_text(w)}{kernel}"


@without_garbage_collection()
def candidates(variants: Sequence[Workload], share: int) -> tuple[Way, ...]:
    """No two alike: a variant of one micro-batch is repeated, others are as they are. Raises TraceError if none divides
    the share (naming the batches), and for different models, types or sequence lengths."""
    if not variants:
        raise TraceError("variants is empty; give at least one variant of the model")
    first = variants[0]
    for w in variants:
        if (w.fingerprint, w.sequence) != (first.fingerprint, first.sequence):
            raise TraceError(
                f"variants are of {first.model} ({first.dtype}, sequence {first.sequence}) and {w.model} ({w.dtype}, "
                f"sequence {w.sequence}); choose one of them with --dtype or --seq"
            )
    found: dict[tuple[object, ...], Way] = {}
    for way in (*map(Way, variants), *_block_by_block(variants)):
        repeats, rest = divmod(share, way.batch * way.micro_batches)
        if rest or not repeats or (way.micro_batches > 1 and repeats > 1):
            continue
        if repeats * way.micro_batches <= MOST_MICRO_BATCHES:
            made = way.repeated(repeats)
            found.setdefault(made.key, made)
    if not found:
        sizes = sorted({w.batch * w.micro_batches for w in variants})
        raise TraceError(
            f"a rank's share of the global batch is {share} sequences; the trace holds micro-batches of "
            f"{', '.join(map(str, sizes))}, none of which divides it (in at most {MOST_MICRO_BATCHES} micro-batches)"
        )
    return tuple(found.values())


def _block_by_block(variants: Sequence[Workload]) -> Iterator[Way]:
    """[Note: which blocks] of variants with one micro-batch without a choice yet."""
    plain = [w for w in variants if w.micro_batches == 1 and not w.activations]
    recomputing = {(w.batch, w.attention, w.dtype): w for w in reversed(plain) if w.checkpointing and not w.recompute}
    seen: set[tuple[int, str, str]] = set()
    for kept in plain:
        same = (kept.batch, kept.attention, kept.dtype)
        if kept.checkpointing or same in seen:
            continue
        seen.add(same)
        yield from _of_pair(recomputing.get(same), kept)


def _of_pair(recomputed: Workload | None, kept: Workload) -> Iterator[Way]:
    """A model not a stack of equal blocks has no mixtures, and a block without activations is not offloaded."""
    blocks = _blocks(kept)
    count = len(blocks)
    if recomputed is not None and blocks:
        try:
            mix_blocks(recomputed, kept, blocks[-1:])
        except TraceError:
            recomputed = None
    if recomputed is not None:
        for n in sorted({count * quarters // 4 for quarters in (1, 2, 3)} - {0, count}):
            yield Way(recomputed, kept=kept, keep=blocks[count - n :])
    for offloaded, recomputing_too in _offload_sets(blocks):
        with contextlib.suppress(TraceError):
            stashes = stashes_of(kept, offloaded)
            if not recomputing_too:
                yield Way(kept, stashes=stashes)
            elif recomputed is not None:
                rest = set(blocks) - set(recomputing_too)
                yield Way(recomputed, kept=kept, keep=tuple(rest), stashes=stashes)


def _offload_sets(blocks: Sequence[str]) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """(offloaded blocks, recomputing blocks), by [Note: which blocks]."""
    count = len(blocks)
    ends = (1 + count // 4, 1 + count // 2, 1 + count * 3 // 4, count - 2)
    firsts = [blocks[1:n] for n in ends if 1 < n <= count - 2]
    strides = [blocks[1 : count - 2 : k] for k in (2, 4, 8) if k < count - 3]
    seen: set[tuple[tuple[str, ...], int]] = set()
    for offloaded in (*firsts, *strides):
        others = [block for block in blocks if block not in set(offloaded)]
        for n in (0, len(others)) if offloaded in firsts else (0, len(others) // 2, len(others)):
            if (tuple(offloaded), n) not in seen:
                seen.add((tuple(offloaded), n))
                yield offloaded, others[:n]


def relayed_ways(ways: Sequence[Way], policy: str) -> Iterator[Way]:
    """In every layer-major order that a way of several micro-batches allows; boundaries go to the host if all blocks
    recompute.
    """
    known: dict[tuple[int, str], bool] = {}
    for way, order in product(ways, ORDERS[1:]):
        if way.micro_batches == 1 or not way.order.of_loop or way.stash_bytes or way.boundaries_on_host:
            continue
        if order == RELAY_HOST and (way.activations or not way.checkpointing):
            continue
        key = (id(way.source), order)
        if key not in known:
            known[key] = _has_order(way.source, order, policy)
        if known[key]:
            yield way.in_order(order)


def _has_order(w: Workload, order: str, policy: str) -> bool:
    try:
        made = in_order(policy, w if w.micro_batches > 1 else repeat_micro_batch(w, 2), order)
    except CannotPlan:
        return False
    return made.boundaries_on_host or order != RELAY_HOST
