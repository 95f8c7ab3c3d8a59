"""Cheapest: the cheapest machine that trains a model on a number of tokens by a deadline.

Every machine with a price is tried: one node and, if a network joins its nodes, as many nodes as the deadline requires
(numbers that double, then bisection). The ranks share the sequences of an iteration, cut into the largest micro-batches
that fit under some policy, and the fastest policy counts. Without other parallelism (stages_compared.py) that is data
parallelism. Idle time, failures, evaluation and storage are not counted.

[Note: in the order of prices] With other parallelism the machine whose closed forms cost least is planned next, in ways
that may be below the cheapest offer.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cache, partial
from math import inf

from pstar_sim.arguments import file_path, number, refused, text, whole
from pstar_sim.arguments import names as listed
from pstar_sim.bounds.shares import AnyShares, any_job, tightest
from pstar_sim.catalog.entries import MOST_NODES_OF_A_MACHINE
from pstar_sim.catalog.loader import as_listed, with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.prices import Price, load_prices
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.core.workspace import beyond_all
from pstar_sim.cost import CostModel
from pstar_sim.errors import CannotPlan, DoesNotFit, ModelError, NothingFits, PstarError, UnknownName
from pstar_sim.planner.asked import OnPart, asked_names, settings_of, teller
from pstar_sim.planner.balance import chooses, roomiest_job
from pstar_sim.planner.batch_shares import least_batch, machine_of
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.compare import Row, compare
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.memory_needs import shortage
from pstar_sim.planner.stages_compared import StagesRow, compare_stages, least_s
from pstar_sim.planner.stages_degrees import ASKED, Way, ways_of
from pstar_sim.policy.registry import STAGED, named, reorders
from pstar_sim.python310 import Unpack
from pstar_sim.workload.axes import AxesGiven
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.parallelism import Parallelism
from pstar_sim.workload.workload import MOST_MOMENTS, Workload

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_NODES = 64
ENOUGH = 3
"""Micro-batches of a job asked for room, as the middle ones hold the same, save in layer-major order."""
POLICIES = named(lambda able: able.tries_others)
"""If none is named: as fast as any other without options, to 0.01 % (policy/kit/ties.py)."""


@dataclass(frozen=True, kw_only=True)
class Bill:
    days: float
    usd: float
    usd_per_million_tokens: float


def bill(tokens: float, tokens_per_s: float, usd_per_hour: float) -> Bill:
    seconds = tokens / tokens_per_s
    usd = seconds / HOUR_S * usd_per_hour
    return Bill(days=seconds / DAY_S, usd=usd, usd_per_million_tokens=usd / tokens * 1e6)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Some nodes of one machine.

    in_time: whether the offer makes the deadline; True without a deadline, None: not planned.
    in_time_is_sure: whether the deadline lies outside of the error of `days`; True without one.
    usd_per_hour: price of all nodes.
    batch: sequences per micro-batch, of all GPUs together.
    price_of: where the price comes from, and its date.
    expected_error, trust: of tokens_per_s, as in `Fit`.
    tflops_per_gpu, mfu: see utilization.py.
    least_days: days of the matmuls alone, or of the least way; if these miss the deadline, nothing is planned.
    least_usd: of a machine left out, by closed forms and estimates of its ways.
    reason: why there are no figures, or why more nodes were not tried.
    """

    machine: str
    nodes: int
    gpus: int
    usd_per_hour: float | None = None
    price_of: str | None = None
    tried: tuple[int, ...] = ()
    in_time: bool | None = False
    in_time_is_sure: bool = True
    policy: str | None = None
    parallel: str | None = None
    recompute: str | None = None
    batch: int | None = None
    micro_batches: int | None = None
    tokens_per_s: float | None = None
    days: float | None = None
    usd: float | None = None
    usd_per_million_tokens: float | None = None
    expected_error: float | None = None
    trust: str | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    least_days: float | None = None
    least_usd: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cheapest(Collection):
    """rows: offers in time, cheapest first; then late ones, fastest first; then offers without figures.
    alike: of one machine.
    """

    model: str
    tokens: float
    deadline_s: float | None
    rows: tuple[Offer, ...]
    alike: bool
    job: Job

    _name = "machine"

    @property
    def best(self) -> Offer | None:
        return self.rows[0] if self.rows and self.rows[0].in_time else None

    @property
    def too_late(self) -> bool:
        """No offer makes the deadline, but a later one would help."""
        return self.best is None and any(row.days is not None or row.least_days is not None for row in self.rows)

    def to_json(self) -> list[dict[str, object]]:
        return [{**asdict(row), "kernels": self.job.flavour} for row in self.rows]


def cheapest(
    model: str,
    *,
    tokens: float,
    batch: int,
    seq: int,
    deadline_s: float | None = None,
    machines: Iterable[str | Machine] | str | None = None,
    policies: Iterable[str] | str | None = None,
    settings: Settings | None = None,
    loading: Loading | str | None = None,
    prices: str | None = None,
    most_nodes: int = MOST_NODES,
    nodes: Sequence[int] | None = None,
    parallel: str | Parallelism | None = None,
    kind: type[Job] = Job,
    on_part: OnPart | None = None,
    **axes: Unpack[AxesGiven],
) -> Cheapest:
    """Returns the cheapest machine that trains a model on `tokens` tokens by the deadline, and the other offers.

    batch: sequences per iteration, of all ranks and micro-batches together.
    seq: tokens per sequence.
    deadline_s: seconds of training; None: no deadline.
    machines: None: every machine with a price.
    policies: None: all_on_gpu, zero_offload and tide.
    settings, loading: as in `fits`.
    prices: a price file, before the shipped list.
    nodes: a row for each of these numbers of nodes; None: one for the fewest that make the deadline, up to most_nodes.
    parallel: as in `max_model`.
    kind: of the job, which writes the workloads.
    on_part: called with the machine that is asked next, the number of machines done and the number of all machines.
    axes: as in `preset`; without dtype, that of each machine's GPU.

    Raises PstarError for an unknown model or machine, and for a wrong price. Machines without a price have no USD and
    stand behind the others.
    """
    if not (isinstance(kind, type) and issubclass(kind, Job)):
        raise refused("kind", kind, "a class of jobs")
    job = kind(model=text("model", model, "the name of one"), batch=batch, seq=seq, **axes)
    number("tokens", tokens)
    if deadline_s is not None:
        number("deadline_s", deadline_s)
    whole("most_nodes", most_nodes, most=MOST_NODES_OF_A_MACHINE)
    known = load_prices(None if prices is None else str(file_path("prices", prices)))
    settings = settings_of(settings)
    asked = _Question(
        job=job,
        batch=batch,
        loading=loading_of(loading),
        settings=settings,
        policies=None if policies is None else tuple(asked_names(policies)),
        parallel=parallel,
        tokens=tokens,
        deadline_s=deadline_s,
    )
    wanted = known if machines is None else listed("machines", machines, "machines or names of machines")
    chosen = [machine_of(m) for m in wanted]  # type: ignore[arg-type]
    if not chosen:
        raise PstarError("machines = []: give at least one machine, or leave machines out for all with a price")
    asked_nodes = () if nodes is None else listed("nodes", nodes, "whole numbers, such as [1, 2]")
    counts = None if nodes is None else [whole("nodes", n, most=MOST_NODES_OF_A_MACHINE) for n in asked_nodes]
    tell = teller(on_part)
    rows: list[Offer] = []
    if counts is None:
        searches = [_offer(m, asked, _price_of(m, known), most_nodes) for m in chosen]
        rows += _in_order(chosen, searches, tell)
    else:
        for number_, machine in enumerate(chosen):
            tell(machine.name, number_, len(chosen))
            rows += [_exactly(machine, n, asked, _price_of(machine, known)) for n in counts]
    alike = len(chosen) == 1
    rows.sort(key=partial(_rank, alike=alike))
    return Cheapest(model=model, tokens=tokens, deadline_s=deadline_s, rows=tuple(rows), alike=alike, job=job)


def _rank(row: Offer, *, alike: bool) -> tuple[float, ...]:
    if row.least_usd is not None:
        return (1.5, row.least_usd)
    if row.days is None:
        return (3.0, row.least_days or inf)
    if not row.in_time:
        return (2.0, row.days)
    if row.usd is None:
        return (1.0, row.days * (row.nodes if alike else 1))
    return (0.0, row.usd)


@dataclass(frozen=True, kw_only=True)
class _Question:
    job: Job
    batch: int
    loading: Loading
    settings: Settings
    policies: tuple[str, ...] | None
    parallel: str | Parallelism | None
    tokens: float
    deadline_s: float | None

    def iteration_s(self, training_s: float) -> float:
        return training_s * self.batch * (self.job.seq or 1) / self.tokens

    def tokens_per_s(self, iteration_s: float) -> float:
        return self.batch * (self.job.seq or 1) / iteration_s

    def workloads(self, machine: Machine, micro_batches: int, *, most: int | None = None) -> tuple[Workload, ...]:
        """Of at most `most` of them. Raises PstarError if the ranks cannot share one."""
        count = micro_batches if most is None else min(most, micro_batches)
        return replace(self.job, batch=self.batch // micro_batches, micro_batches=count).of(machine)


_Search = Generator[float, float, Offer]
"""Yields the next plan's least price, for the cheapest so far."""
_Cost = tuple[float | None, str]
"""USD per hour of one node and its source, or None and how to give a price."""


def _price_of(machine: Machine, prices: Mapping[str, Price]) -> _Cost:
    price, listed_as = prices.get(machine.name), as_listed(machine)
    if price is not None and not price.own and listed_as is not None and listed_as.local_ranks != machine.local_ranks:
        return (
            None,
            f"the price is that of a node of {listed_as.local_ranks} GPUs; give one of your own with --prices FILE",
        )
    if price is not None and (price.own or machine.price_usd_per_hour is None):
        when = "" if price.as_of is None else f", {price.as_of}"
        return price.usd_per_hour, f"{price.offer or price.source}{when}"
    if machine.price_usd_per_hour is not None:
        return machine.price_usd_per_hour / machine.nodes, "the machine's own entry"
    return None, f"no price; give one with --prices FILE ([{machine.name}] usd_per_hour = ...) or --set price=..."


def _counts(machine: Machine, batch: int, most: int) -> list[int]:
    if machine.network is None:
        return [machine.nodes]
    local = machine.ranks[: machine.local_ranks]
    parts = [Fraction(rank.batch_share).limit_denominator(10**6) for rank in local]
    shares = {batch * part / sum(parts) for part in parts}
    counts = range(machine.nodes, max(most, machine.nodes) + 1)
    return [n for n in counts if n == machine.nodes or all((share / n).denominator == 1 for share in shares)]


def _in_order(machines: Sequence[Machine], searches: Sequence[_Search], tell: OnPart) -> list[Offer]:
    """[Note: in the order of prices]"""
    rows: dict[int, Offer] = {}
    waiting = [(next(search), n) for n, search in enumerate(searches)]
    while waiting:
        _, n = heapq.heappop(waiting)
        best_usd = min((row.usd for row in rows.values() if row.in_time and row.usd is not None), default=inf)
        tell(machines[n].name, len(rows), len(machines))
        try:
            heapq.heappush(waiting, (searches[n].send(best_usd), n))
        except StopIteration as end:
            rows[n] = end.value
    return [rows[n] for n in range(len(machines))]


def _offer(machine: Machine, asked: _Question, cost: _Cost, most_nodes: int) -> _Search:
    """The fewest nodes that make the deadline, else the nearest: doubling, then bisection. Where one is left out that
    may be late, all are asked, and the cheapest counts."""
    counts = _counts(machine, asked.batch, most_nodes)
    rows: dict[int, Offer] = {}

    def ask(nodes: int) -> Generator[float, float, tuple[Offer, bool]]:
        where, limit_usd, final = _of_nodes(machine, nodes), inf, False
        least = None if asked.parallel is None else _least(where, asked, cost)
        if least is not None and least.least_usd is not None:
            limit_usd = yield least.least_usd
        if least is not None and (least.reason is not None or (least.least_usd or 0.0) >= limit_usd):
            rows[nodes] = least
        else:
            rows[nodes], final = _so_many(where, asked, cost, limit_usd=limit_usd)
        return rows[nodes], final

    yield 0.0
    at, below = 0, -1  # positions in counts; below: the last number that was too slow or too small
    row, final = yield from ask(counts[0])
    while not row.in_time and not final and at + 1 < len(counts):
        below = below if row.in_time is None else at
        at = min(bisect.bisect_left(counts, 2 * counts[at]), len(counts) - 1)
        row, final = yield from ask(counts[at])
    while row.in_time and at - below > 1 and all(tried.in_time is not None for tried in rows.values()):
        middle = (at + below) // 2
        tried, _ = yield from ask(counts[middle])
        if tried.in_time:
            at, row = middle, tried
        elif tried.in_time is False:
            below = middle
    if any(tried.in_time is None for tried in rows.values()):
        for nodes in counts[below + 1 : at]:
            if nodes not in rows:
                yield from ask(nodes)
    if left_out := [tried for tried in rows.values() if tried.least_usd is not None]:
        planned = [tried for tried in rows.values() if tried.in_time and tried.usd is not None]
        row = min(planned or left_out, key=lambda one: one.usd or one.least_usd or 0.0)
    elif not row.in_time:
        row = min((r for r in rows.values() if r.days is not None), key=lambda r: r.days or 0.0, default=row)
        if row.reason is None:
            row = replace(row, reason=f"too slow, and {_no_more(machine, asked.batch, most_nodes)}")
    return replace(row, tried=tuple(sorted(rows)))


def _exactly(machine: Machine, nodes: int, asked: _Question, cost: _Cost) -> Offer:
    base = Offer(machine=machine.name, nodes=nodes, gpus=nodes * machine.local_ranks, price_of=cost[1], tried=(nodes,))
    try:
        where = _of_nodes(machine, nodes)
    except PstarError as error:
        return replace(base, reason=str(error))
    row, _ = _so_many(where, asked, cost, late=True)
    return replace(row, tried=(nodes,))


def _of_nodes(machine: Machine, nodes: int) -> Machine:
    """Its own nodes, which may differ, or so many like the first."""
    return machine if nodes == machine.nodes else with_nodes(machine, nodes)


def _no_more(machine: Machine, batch: int, most_nodes: int) -> str:
    if machine.network is None:
        return "no network joins several nodes of it"
    if batch // machine.local_ranks <= most_nodes:
        return f"more GPUs cannot share {batch} sequences"
    return f"more than {most_nodes} nodes were not tried"


def _offer_of(machine: Machine, cost: _Cost) -> Offer:
    usd, what = cost
    return Offer(
        machine=machine.name,
        nodes=machine.nodes,
        gpus=machine.world_size,
        usd_per_hour=None if usd is None else usd * machine.nodes,
        price_of=what,
    )


def _least(machine: Machine, asked: _Question, cost: _Cost) -> Offer | None:
    """None if a plan has to say why there is none."""
    offer, policies = _offer_of(machine, cost), asked.policies or STAGED
    try:
        job, ways, _ = _ways(machine, asked)
        iteration_s = least_s(job, machine, policies, ways, asked.settings) if ways else inf
    except ModelError:
        raise
    except PstarError:
        return None
    if iteration_s == inf:
        return None
    due = bill(asked.tokens, asked.tokens_per_s(iteration_s), offer.usd_per_hour or 0.0)
    if asked.deadline_s is not None and due.days * DAY_S > asked.deadline_s:
        return replace(offer, least_days=due.days, reason=_too_slow(due.days))
    return replace(_left_out(offer), least_days=due.days, least_usd=None if offer.usd_per_hour is None else due.usd)


def _left_out(offer: Offer, *, in_time: bool | None = None) -> Offer:
    return replace(offer, in_time=in_time, in_time_is_sure=False)


def _too_slow(days: float) -> str:
    return f"too slow: {days:,.1f} days if it never waited for anything"


def _so_many(
    machine: Machine, asked: _Question, cost: _Cost, *, late: bool = False, limit_usd: float = inf
) -> tuple[Offer, bool]:
    """With whether the reason would be the same with more nodes.

    late: also what misses the deadline even if it never waits.
    limit_usd: what costs more is not planned.
    """
    (usd, _), deadline_s, base = cost, asked.deadline_s, _offer_of(machine, cost)
    try:
        row: Row | StagesRow
        if asked.parallel is None:
            training_s = _least_s(machine, asked)
            if not late and deadline_s is not None and training_s > deadline_s:
                days = training_s / DAY_S
                return replace(base, least_days=days, reason=_too_slow(days)), False
            row, batch, micro_batches = _fastest(machine, asked)
        else:
            training_s = inf if base.usd_per_hour is None else limit_usd / base.usd_per_hour * HOUR_S
            limit_s = asked.iteration_s(training_s)
            way = _fastest_way(machine, asked, limit_s)
            if way is None or (way.iteration_s or 0.0) > limit_s:
                most_s = inf if deadline_s is None else asked.iteration_s(deadline_s)
                in_time = True if way is not None and (way.iteration_s or 0.0) <= most_s else None
                left_out = _left_out(base, in_time=in_time)
                return replace(left_out, least_usd=limit_usd, least_days=training_s / DAY_S), False
            row, batch, micro_batches = way, way.batch, way.micro_batches
    except (DoesNotFit, CannotPlan) as error:
        return replace(base, reason=str(error)), False
    except (ModelError, UnknownName):
        raise
    except PstarError as error:
        return replace(base, reason=str(error)), True
    assert row.tokens_per_s is not None
    due = bill(asked.tokens, row.tokens_per_s, (usd or 0.0) * machine.nodes)
    uncertainty, why = (row.expected_error, row.trust) if isinstance(row, Row) else (None, None)
    offer = replace(
        base,
        in_time=deadline_s is None or due.days * DAY_S <= deadline_s,
        in_time_is_sure=deadline_s is None or abs(deadline_s / (due.days * DAY_S) - 1) > (uncertainty or 0.0),
        policy=row.policy,
        parallel=None if isinstance(row, Row) else row.parallel,
        recompute=None if isinstance(row, Row) else row.recompute,
        batch=batch,
        micro_batches=micro_batches,
        tokens_per_s=row.tokens_per_s,
        days=due.days,
        usd=None if usd is None else due.usd,
        usd_per_million_tokens=None if usd is None else due.usd_per_million_tokens,
        tflops_per_gpu=row.tflops_per_gpu,
        mfu=row.mfu,
        expected_error=uncertainty,
        trust=why,
    )
    return offer, False


def _least_s(machine: Machine, asked: _Question) -> float:
    """Of the matmuls alone on the slowest rank, in one micro-batch, with the best shares."""
    workloads = asked.workloads(machine, 1)
    every = sum(w.tokens for w in workloads)
    job_of = any_job(workloads[0], machine) if any(map(chooses, asked.policies or POLICIES)) else None
    if job_of is not None:
        layout = build_layout(workloads[0])
        search = AnyShares(sum(w.batch for w in workloads), machine, asked.settings, layout, job_of)
        return search.computing_s() * asked.tokens / every
    kinds = {(id(rank.gpu), id(w)): (r, w) for r, (rank, w) in enumerate(zip(machine.ranks, workloads))}
    layout = build_layout(workloads[0])
    slowest = max(sum(CostModel(w, machine, layout, rank=r).moments_s) for r, w in kinds.values())
    return slowest * asked.tokens / every


def _fastest(machine: Machine, asked: _Question) -> tuple[Row, int, int]:
    """(row, batch of all ranks, micro-batches) of the fastest policy with the largest micro-batches that fit, by
    bisection. Raises the last refusal."""
    in_vain = beyond_all(asked.workloads(machine, 1)[0], machine)
    unit = asked.batch // least_batch(machine)  # which micro-batches divide
    counts = [n for n in range(1, min(unit, MOST_MOMENTS) + 1) if unit % n == 0]
    refusals: dict[int, PstarError] = {}

    @cache
    def roomy(micro_batches: int) -> Sequence[str]:
        try:
            policies, refused = _with_room(machine, asked, micro_batches)
        except PstarError as impossible:
            if micro_batches == 1:
                raise
            policies, refused = [], [impossible]
        for refusal in refused:
            if isinstance(refusal, DoesNotFit) or micro_batches not in refusals:
                refusals[micro_batches] = refusal
        return policies

    def in_turn() -> Iterator[int]:
        if not in_vain and roomy(1):
            yield 1
        if roomy(counts[-1]) and not in_vain:
            yield from counts[bisect.bisect_left(counts, True, 1, key=lambda n: bool(roomy(n))) :]

    for n in filter(roomy, in_turn()):
        try:
            ranked = asked.workloads(machine, n)
        except PstarError as error:  # more moments than a job may have
            refusals[n] = error
            continue
        answer = compare(
            ranked,
            machine,
            policies=roomy(n),
            settings=asked.settings,
            loading=asked.loading,
            barrier_cost=False,
            near=False,
        )
        try:
            return answer.best().row, answer.batch, n
        except NothingFits as error:
            refusals[n] = error
    raise max(refusals.items(), key=lambda one: (isinstance(one[1], DoesNotFit), one[0]))[1]


def _ways(machine: Machine, asked: _Question) -> tuple[Job, list[Way], list[str]]:
    """In one micro-batch or in micro-batches of one sequence per rank."""
    assert asked.parallel is not None
    job = replace(asked.job, batch=asked.batch, micro_batches=1)
    ways, left_out = ways_of(job, machine, asked.parallel)
    if asked.parallel not in ASKED:
        data, left_out = ways[0].parallelism.data_on(machine.world_size), []
        ways += [replace(ways[0], batch=data, micro_batches=asked.batch // data)] if asked.batch > data else []
    return job, ways, left_out


def _fastest_way(machine: Machine, asked: _Question, limit_s: float) -> StagesRow | None:
    """None if no planned way fits and others are slower. Raises CannotPlan with the reason of what lacks least."""
    job, ways, left_out = _ways(machine, asked)
    policies, settings = asked.policies or STAGED, asked.settings
    answer = compare_stages(job, machine, policies, ways, left_out=left_out, limit_s=limit_s, settings=settings)
    if answer.rows and answer.rows[0].fits:
        return answer.rows[0]
    if limit_s < inf and answer.unplanned:
        return None
    short = [row for row in answer.rows if row.needed_bytes is not None]
    if not short:
        raise CannotPlan("; ".join(answer.left_out) or "no way to spread the job is left")
    row = min(short, key=lambda row: (row.needed_bytes or 0) - (row.available_bytes or 0))
    raise CannotPlan(f"{row.parallel}: {row.reason}")


def _with_room(machine: Machine, asked: _Question, micro_batches: int) -> tuple[list[str], list[PstarError]]:
    """The policies with room, and why others have none. Raises PstarError as `workloads`."""
    policies = asked.policies or POLICIES
    most = None if any(map(reorders, policies)) else ENOUGH
    few = asked.workloads(machine, micro_batches, most=most)
    hardest = few[0] if len({id(w) for w in few}) == 1 else tightest(few, machine)
    job_of = any_job(few[0], machine)
    roomiest = hardest if job_of is None else roomiest_job(sum(w.batch for w in few), machine, job_of)
    roomy: list[str] = []
    refusals: list[PstarError] = []
    for policy in policies:
        try:
            job = roomiest if chooses(policy) else hardest  # which does not take the machine's shares
            short = shortage(policy, job, machine, asked.settings, loading=asked.loading)
        except CannotPlan as error:
            refusals.append(error)
            continue
        if short is None:
            roomy.append(policy)
        else:
            refusals.append(short)
    return roomy, refusals
