"""Ablate: the gain of each idea, from a published schedule to a near-optimal one, one change at a time.

[Note: the ladder] The ladder begins at a published system, by default `patrickstar`. The next line is the point of the
asynchronous policies (policy/kit/points.py) that is most like the system (`Capabilities.near`), else the plainest, with
none of the ideas. There the queues run independently. Then one coordinate after the other takes its better values, down
to the policy asked about. The gain of a line depends on the lines above it.

Unless a setting itself makes Adam wait for all gradients, the ladder first drops the barrier and then lets Adam begin
early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pstar_sim.arguments import flag, function, text
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import NothingFits, PstarError
from pstar_sim.planner.asked import settings_of
from pstar_sim.planner.balance import refuse_balance
from pstar_sim.planner.batch_shares import machine_of, share_out
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.compare import Row, compare
from pstar_sim.policy.kit.iteration_order import ORDERS, order_of
from pstar_sim.policy.kit.options import options_of, show
from pstar_sim.policy.registry import can, find_policy, named, policy_name
from pstar_sim.renderers import render_html
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    import pandas

(BASE,) = named(lambda able: able.one_at_a_time)
(BEST,) = named(lambda able: able.tries_others)

# Coordinate -> its values from the plainest to the best, each with its meaning.
_VALUES: dict[str, dict[str, str]] = {
    "capacity": {"peak": "capacity: constant, the peak's", "tide": "capacity: each moment's own"},
    "eviction": {"lru": "eviction: LRU", "fifo": "eviction: FIFO", "belady": "eviction: Belady"},
    "prefetch": {"none": "prefetch: none", "1": "prefetch: one chunk", "edf": "prefetch: by deadline"},
    "barrier": {"on": "barrier: kept", "off": "barrier: none"},
    "adam": {
        "after-backward": "Adam: after backward, in layer order",
        "fifo": "Adam: as gradients arrive",
        "edf": "Adam: by deadline",
    },
    "pins": {"0": "pins: none", "optimal": "pins: as many as pay"},
    "streams": {"off": "streams: none", "on": "streams: as many as pay"},
    "order": {"depth-first": "order: micro-batch by micro-batch", "relay": "order: layer by layer"},
    "sums": {"off": "sums of gradients: where states are", "on": "sums of gradients: on the GPU where that pays"},
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line whose policy does not fit has a reason and no figures.

    change: from the line above (in `without`: from the policy asked about).
    gained_s: negative if the change costs time; None for the first line.
    gained_h2d_bytes, gained_d2h_bytes: bytes saved; None for the first line.
    total_s: saved since the first line that fits.
    gap, bound_by: as in `Row`.
    """

    change: str
    policy: str
    fits: bool
    reason: str | None = None
    iteration_s: float | None = None
    gained_s: float | None = None
    total_s: float | None = None
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    gained_h2d_bytes: int | None = None
    gained_d2h_bytes: int | None = None
    gap: float | None = None
    bound_by: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Ablation(Collection):
    """workload: one rank's share.
    batch: sequences per micro-batch, of all GPUs together.
    settings: the settings asked for, with the chunk size that every line has.
    lines: the ladder. The gains of the lines that fit add up to total_s of the last.
    without: the policy asked about (`policy`) with one idea taken out, one line per idea; gains are negative if the
        idea pays.
    """

    workload: Workload
    machine: Machine
    settings: Settings
    batch: int
    policy: str
    lines: tuple[Line, ...]
    without: tuple[Line, ...]
    notes: tuple[str, ...] = ()

    def _rows(self) -> tuple[Line, ...]:
        return (*self.lines, *self.without)

    @property
    def barrier(self) -> str | None:
        """Why Adam waits for all gradients; None if it does not."""
        return self.settings.barrier(self.workload.compute_dtype)

    def to_json(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "barrier": self.barrier,
            "lines": [line.to_json() for line in self.lines],
            "without": [line.to_json() for line in self.without],
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row per line; `part` is "ladder" or "without"."""
        import pandas

        rows = [{"part": "ladder", **line.to_json()} for line in self.lines]
        return pandas.DataFrame(rows + [{"part": "without", **line.to_json()} for line in self.without])

    def _repr_html_(self) -> str:
        return render_html(self)


def ablate(
    workload: Workload | Sequence[Workload],
    machine: Machine | str,
    settings: Settings | None = None,
    *,
    policy: str = BEST,
    begin: str = BASE,
    certify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Returns the gain of each idea between `begin`, a published system, and `policy`, a policy of the asynchronous
    family.

    workload, machine: as in `compare`. If `settings` leave the chunk size open, every line has the chunk size of
        `policy`, which is planned first. On several ranks `patrickstar`, whose chunks are not sliced, has its own.
    certify: whether to use the bound of the fluid linear program.
    progress: called with (lines planned, number of lines).

    Raises UnknownName for an unknown policy, PstarError for a `policy` that is not a point of the family or is `begin`
    itself, and NothingFits if `policy` does not fit.
    """
    machine = machine_of(machine)
    setting = settings_of(settings)
    text("policy", policy, "the name of a policy")
    text("begin", begin, "the name of a policy")
    flag("certify", certify)
    if progress is not None:
        function("progress", progress)
    refuse_balance([policy, begin], machine)
    share = share_out(workload, machine)
    each = share.ranked or (share.workload,) * machine.world_size
    if setting.loop == "step":
        policy = _in_its_order(policy, each, machine, setting)
    own = replace(setting, loop="own")  # each line names its order
    free = own.barrier(share.workload.compute_dtype) is None
    w = share.workload
    sums = w.micro_batches > 1 and w.order.sums_leave_gpu
    steps = ladder(policy, barrier=free, begin=begin, sums=sums)
    taken_out = left_out(policy, barrier=free, sums=sums)
    asked = steps[-1][1]
    specs = list(dict.fromkeys([asked, *(spec for _, spec in (*steps, *taken_out))]))
    tell = progress or _unheard
    tell(0, len(specs))
    alone = partial(compare, each, machine, barrier_cost=False, near=False)
    best = alone(policies=[asked], settings=own, certify=certify)
    if not best.rows[0].fits:
        raise NothingFits(f"{asked} does not fit, so there is nothing to ablate: {best.rows[0].reason}")
    settings = replace(own, chunk_bytes=best[asked].plan.layout.chunk_bytes)
    rows = {asked: best.rows[0]}
    for spec in specs[1:]:
        tell(len(rows), len(specs))
        used = own if _has_own_chunks(spec, machine) else settings
        row = alone(policies=[spec], settings=used).rows[0]
        # The same job with the same chunks: its bound also holds for this plan.
        rows[spec] = _held_against(row, best.rows[0].lower_bound_s) if certify and used is settings else row
    tell(len(specs), len(specs))
    without = [_line(change, rows[spec], rows[asked], None) for change, spec in taken_out]
    return Ablation(
        workload=best.workload,
        machine=machine,
        settings=replace(settings, loop=setting.loop),
        batch=best.batch,
        policy=policy_name(policy),
        lines=tuple(_ladder_lines(steps, rows)),
        without=tuple(without),
        notes=best.notes,
    )


def _unheard(done: int, count: int) -> None:
    """Does nothing."""


def _in_its_order(policy: str, each: Sequence[Workload], machine: Machine, settings: Settings) -> str:
    if not can(policy).tries_others:
        return policy
    found = compare(each, machine, policies=[policy], settings=settings, barrier_cost=False, near=False)
    if not found.rows[0].fits:
        return policy
    order = order_of(found[policy].plan.workload)
    return policy if order == ORDERS[0] else policy_name(f"{policy}:order={order}")


def _has_own_chunks(spec: str, machine: Machine) -> bool:
    """On several ranks patrickstar's chunks are whole, of a size of its own."""
    return spec == BASE and machine.data_parallel_size > 1


def _ladder_lines(steps: Sequence[tuple[str, str]], rows: Mapping[str, Row]) -> list[Line]:
    lines: list[Line] = []
    first: Row | None = None
    before: Row | None = None
    for change, spec in steps:
        lines.append(_line(change, rows[spec], before, first))
        if rows[spec].fits:
            before = rows[spec]
            first = first or before
    return lines


def _held_against(row: Row, bound_s: float | None) -> Row:
    gap = None
    if bound_s is not None and row.iteration_s is not None:
        gap = row.iteration_s / bound_s - 1
    return replace(row, lower_bound_s=bound_s, gap=gap)


def ladder(policy: str, *, barrier: bool, begin: str = BASE, sums: bool = False) -> list[tuple[str, str]]:
    """Returns (change, spec) of every line, `begin` first and `policy` last.

    barrier: whether the policy may choose the barrier.
    sums: whether the policy may choose where gradients add up.

    Raises PstarError for a policy outside of the asynchronous family or `begin` itself.
    """
    own = _place_of(policy, barrier, sums)
    able, first = can(begin.partition(":")[0].strip()), policy_name(begin)
    if first == policy_name(policy):
        raise PstarError(f"begin and policy are both {first}; an ablation needs two different policies")
    now = {key: next(iter(values)) for key, values in _VALUES.items() if key in own}
    near = able.near or able.point
    if near is not None:
        now |= {key: show(value) for key, value in asdict(near).items() if key in own}
    lines = [("as published, one thing at a time" if able.one_at_a_time else "as published", first)]
    lines.append(("queues: none waits for another" if near is None else "the point nearest to it", _spec(policy, now)))
    for key, values in _VALUES.items():
        if key not in own:
            continue
        for word in _between(list(values), now[key], own[key]):
            now[key] = word
            lines.append((_means(key, word), _spec(policy, now)))
    return lines


def _between(words: Sequence[str], first: str, last: str) -> Sequence[str]:
    """`last` alone if one of the two is not among `words`, or they are in reverse order."""
    if first in words and last in words and words.index(first) < words.index(last):
        return words[words.index(first) + 1 : words.index(last) + 1]
    return [] if first == last else [last]


def left_out(policy: str, *, barrier: bool, sums: bool = False) -> list[tuple[str, str]]:
    """(plainer value, spec of the policy with it) for each plainer value of each coordinate."""
    own = _place_of(policy, barrier, sums)
    return [
        (_means(key, word), _spec(policy, {**own, key: word}))
        for key, values in _VALUES.items()
        if key in own
        for word in _before(list(values), own[key])
    ]


def _before(words: Sequence[str], own: str) -> Sequence[str]:
    """The plainest if the policy's own value is not among `words`."""
    return words[: words.index(own)] if own in words else words[:1]


def _place_of(policy: str, barrier: bool, sums: bool) -> dict[str, str]:
    name = policy.partition(":")[0].strip()
    found = find_policy(policy)
    options = options_of(find_policy(name))
    if not set(_VALUES) <= set(options):
        *some, last = reversed(named(lambda able: able.point is not None))
        raise PstarError(f"{policy} is not a point of the asynchronous policies; ablate {', '.join(some)} or {last}")
    values = {key: show(option.default) for key, option in options.items() if key in _VALUES}
    values |= {key: show(value) for key, value in getattr(found, "values", {}).items()}
    if values["order"] not in ORDERS:  # the policy chooses; each line is for a loop of the user's own
        values["order"] = ORDERS[0]
    chosen = {"barrier": barrier, "sums": sums and values["order"] == ORDERS[0]}
    return {key: value for key, value in values.items() if chosen.get(key, True)}


def _spec(policy: str, place: dict[str, str]) -> str:
    name = policy.partition(":")[0].strip()
    given = [f"{key}={value}" for key, value in place.items() if (key, value) != ("order", ORDERS[0])]
    return policy_name(f"{name}:{','.join(given)}")


def _means(key: str, word: str) -> str:
    return _VALUES[key].get(word, f"{key}: {word}")


def _line(change: str, row: Row, before: Row | None, first: Row | None) -> Line:
    if not row.fits:
        return Line(change=change, policy=row.policy, fits=False, reason=row.reason)

    def saved(name: str, since: Row | None) -> float | None:
        return None if since is None else getattr(since, name) - getattr(row, name)

    h2d, d2h = saved("h2d_bytes", before), saved("d2h_bytes", before)
    return Line(
        change=change,
        policy=row.policy,
        fits=True,
        iteration_s=row.iteration_s,
        gained_s=saved("iteration_s", before),
        total_s=saved("iteration_s", first) if first is not None else None if before is not None else 0.0,
        h2d_bytes=row.h2d_bytes,
        d2h_bytes=row.d2h_bytes,
        gained_h2d_bytes=None if h2d is None else int(h2d),
        gained_d2h_bytes=None if d2h is None else int(d2h),
        gap=row.gap,
        bound_by=row.bound_by,
    )
