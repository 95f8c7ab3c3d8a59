"""Cheapest: the cheapest machine that trains a model on a number of tokens by a deadline.

Every machine with a price is tried: one node and, if a network joins its nodes, as many nodes as the deadline requires
(numbers that double, then bisection). The ranks share the sequences of an iteration, cut into the largest micro-batches
that fit under some policy; the fastest policy counts. Only data parallelism is modelled, with the simulated cost of
communication between nodes. Several machines without a network between them are not counted together. Tensor, pipeline
or expert parallelism, the likely choice for models that fill many nodes, is not modelled. Idle time, failures,
evaluation and storage cost extra and are left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from pstar_sim.arguments import choice, file_path, flag, number, whole
from pstar_sim.arguments import names as listed
from pstar_sim.catalog.entries import MOST_NODES_OF_A_MACHINE
from pstar_sim.catalog.loader import with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.catalog.prices import Price, load_prices
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import CannotPlan, DoesNotFit, ModelError, PstarError, UnknownName
from pstar_sim.planner.asked import OnPart, asked_names, settings_of, teller
from pstar_sim.planner.balance import refuse_balance
from pstar_sim.planner.batch_shares import machine_of, shares_of_batch, tightest
from pstar_sim.planner.collection import Collection
from pstar_sim.planner.compare import Row, compare
from pstar_sim.planner.memory_needs import memory_need
from pstar_sim.policy.registry import named
from pstar_sim.renderers import render_text
from pstar_sim.workload.loading import Loading, loading_of
from pstar_sim.workload.lora import Adapter, adapter
from pstar_sim.workload.optimizers import optimizer_spec
from pstar_sim.workload.presets import default_dtype, kernels_of, preset
from pstar_sim.workload.workload import DTYPE_BYTES, MOST_MOMENTS, Workload

if TYPE_CHECKING:
    import pandas

__all__ = ["Bill", "Cheapest", "Offer", "bill", "cheapest"]

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_NODES = 64
POLICIES = named(lambda able: able.tries_others)
"""Policy that is tried if none is named. It is as fast as any other policy without options, to 0.01 %
(policy/kit/ties.py)."""


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Days and dollars for a number of tokens, at a rate and a price."""

    days: float
    usd: float
    usd_per_million_tokens: float


def bill(tokens: float, tokens_per_s: float, usd_per_hour: float) -> Bill:
    """Returns the bill: seconds = tokens / rate; USD = hours x price."""
    seconds = tokens / tokens_per_s
    usd = seconds / HOUR_S * usd_per_hour
    return Bill(days=seconds / DAY_S, usd=usd, usd_per_million_tokens=usd / tokens * 1e6)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A number of nodes of one machine.

    machine: name of the machine.
    nodes: number of nodes.
    gpus: number of GPUs of all nodes.
    tried: all numbers of nodes that were tried.
    in_time: whether the offer makes the deadline; True without a deadline.
    in_time_is_sure: whether the deadline lies outside of the error of `days`; True without a deadline.
    usd_per_hour: price of all nodes; None without a price.
    batch: sequences per micro-batch, of all GPUs together.
    price_of: the offer from which the price comes, and its date.
    expected_error: error of tokens_per_s, as in `Fit`.
    trust: the basis of expected_error, as in `Fit`.
    least_days: days that the matmuls alone take; if these miss the deadline, nothing is planned.
    reason: why there are no figures, or why more nodes were not tried.
    """

    machine: str
    nodes: int
    gpus: int
    usd_per_hour: float | None = None
    price_of: str | None = None
    tried: tuple[int, ...] = ()
    in_time: bool = False
    in_time_is_sure: bool = True
    policy: str | None = None
    batch: int | None = None
    micro_batches: int | None = None
    tokens_per_s: float | None = None
    days: float | None = None
    usd: float | None = None
    usd_per_million_tokens: float | None = None
    expected_error: float | None = None
    trust: str | None = None
    least_days: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Cheapest(Collection):
    """The answer of `cheapest`.

    kernels: flavour in which the model runs, as in `Workload`.
    rows: offers that make the deadline, cheapest first; then offers that do not, fastest first; then offers without
        figures.
    """

    model: str
    tokens: float
    deadline_s: float | None
    rows: tuple[Offer, ...]
    kernels: str = ""

    _name = "machine"

    @property
    def best(self) -> Offer | None:
        """The cheapest offer in time; None if no offer is in time."""
        return self.rows[0] if self.rows and self.rows[0].in_time else None

    @property
    def too_late(self) -> bool:
        """Whether no offer makes the deadline, but a later deadline would help: some machine trains the model too
        slowly, or was left out as too slow."""
        return self.best is None and any(row.days is not None or row.least_days is not None for row in self.rows)

    def to_json(self) -> list[dict[str, object]]:
        """Returns the offers, each with the kernels of the job."""
        return [{**asdict(row), "kernels": self.kernels} for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.to_json())

    def __repr__(self) -> str:
        return render_text(self)


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
    dtype: str | None = None,
    checkpointing: bool = True,
    kernels: str | None = None,
    lora: Adapter | str | int | None = None,
    optimizer: str = "adamw",
    loading: Loading | str | None = None,
    prices: str | None = None,
    most_nodes: int = MOST_NODES,
    on_part: OnPart | None = None,
) -> Cheapest:
    """Returns the cheapest machine that trains a model on `tokens` tokens by the deadline, and the other offers.

    model: name of a model of the catalog.
    batch: sequences per iteration, of all ranks and micro-batches together.
    seq: tokens per sequence.
    deadline_s: seconds of training; None: no deadline.
    machines: machines to try; None: every machine with a price.
    policies: policies to try; None: all_on_gpu, zero_offload and tide.
    settings: as in `compare`.
    dtype: working dtype; None: the dtype of each machine's GPU.
    checkpointing, kernels, lora, optimizer: as in `preset`.
    loading: as in `fits`.
    most_nodes: the largest number of nodes to try.
    prices: a price file that takes precedence over the shipped list.
    on_part: called with the machine that is asked next, the number of machines done and the number of all machines.

    Raises PstarError for an unknown model or machine, for a wrong price, and if no machine has a price. If only some
    machines have no price, their rows say so.
    """
    flavour = kernels_of(model_entry(model), kernels)
    number("tokens", tokens)
    if deadline_s is not None:
        number("deadline_s", deadline_s)
    for what, count in (("batch", batch), ("seq", seq)):
        whole(what, count)
    whole("most_nodes", most_nodes, most=MOST_NODES_OF_A_MACHINE)
    flag("checkpointing", checkpointing)
    if dtype is not None:
        choice("dtype", dtype, DTYPE_BYTES)
    optimizer_spec(optimizer)
    loading = loading_of(loading)
    lora = None if lora is None else adapter(lora)
    known = load_prices(None if prices is None else str(file_path("prices", prices)))
    settings = settings_of(settings)
    job = _CheapestJob(
        model,
        batch,
        seq,
        dtype,
        checkpointing,
        kernels,
        lora,
        optimizer,
        loading,
        settings,
        None if policies is None else tuple(asked_names(policies)),
    )
    wanted = known if machines is None else listed("machines", machines, "machines or names of machines")
    chosen = [machine_of(m) for m in wanted]  # type: ignore[arg-type]
    if not chosen:
        raise PstarError("machines = []: give at least one machine, or leave machines out for all with a price")
    for machine in chosen:
        refuse_balance(job.policies or (), machine)
    costs = _prices_of(chosen, known)
    tell = teller(on_part)
    rows: list[Offer] = []
    for machine, cost in zip(chosen, costs):
        tell(machine.name, len(rows), len(chosen))
        if isinstance(cost, str):
            rows.append(Offer(machine=machine.name, nodes=machine.nodes, gpus=len(machine.ranks), reason=cost))
        else:
            rows.append(_offer(machine, job, *cost, tokens, deadline_s, most_nodes))
    rows.sort(key=_rank)
    return Cheapest(model=model, tokens=tokens, deadline_s=deadline_s, rows=tuple(rows), kernels=flavour)


def _rank(row: Offer) -> tuple[float, ...]:
    if row.days is None or row.usd is None:
        return (2.0, row.least_days or float("inf"))
    return (0.0, row.usd) if row.in_time else (1.0, row.days)


@dataclass(frozen=True)
class _CheapestJob:
    model: str
    batch: int
    seq: int
    dtype: str | None
    checkpointing: bool
    kernels: str | None
    lora: Adapter | None
    optimizer: str
    loading: Loading
    settings: Settings
    policies: tuple[str, ...] | None

    def workloads(self, machine: Machine, micro_batches: int) -> tuple[Workload, ...]:
        """Returns the workload of each rank. Raises PstarError if the ranks cannot share a micro-batch of all."""
        shares = shares_of_batch(self.batch // micro_batches, machine)
        known = {share: self._workload(machine, share, micro_batches) for share in sorted(set(shares))}
        return tuple(known[share] for share in shares)

    def _workload(self, machine: Machine, batch: int, micro_batches: int) -> Workload:
        return preset(
            self.model,
            batch=batch,
            seq=self.seq,
            micro_batches=micro_batches,
            dtype=self.dtype or default_dtype(machine),
            checkpointing=self.checkpointing,
            kernels=self.kernels,
            lora=self.lora,
            optimizer=self.optimizer,
        )


def _price_of(machine: Machine, prices: Mapping[str, Price]) -> tuple[float, str] | str:
    """Returns (USD per hour of one node, the offer or source of this price). For an unknown price, returns a text that
    says how to give a price."""
    price = prices.get(machine.name)
    if price is not None and (price.own or machine.price_usd_per_hour is None):
        when = "" if price.as_of is None else f", {price.as_of}"
        return price.usd_per_hour, f"{price.offer or price.source}{when}"
    if machine.price_usd_per_hour is not None:
        return machine.price_usd_per_hour / machine.nodes, "the machine's own entry"
    return f"no price; give one with --prices FILE ([{machine.name}] usd_per_hour = ...) or --set price=..."


def _prices_of(machines: Sequence[Machine], known: Mapping[str, Price]) -> list[tuple[float, str] | str]:
    """Returns the price of each machine: see `_price_of`. Raises PstarError if no machine has a price."""
    costs = [_price_of(machine, known) for machine in machines]
    missing = [cost for cost in costs if isinstance(cost, str)]
    if missing and len(missing) == len(costs):
        names = ", ".join(repr(machine.name) for machine in machines)
        several = len(machines) > 1
        raise PstarError(f"machine{'s' if several else ''} {names} {'have' if several else 'has'} {missing[0]}")
    return costs


def _counts(machine: Machine, batch: int, most: int) -> list[int]:
    """Returns the numbers of nodes, from the machine's own to `most`, that can share the batch."""
    if machine.network is None:
        return [machine.nodes]
    local = machine.ranks[: machine.local_ranks]
    parts = [Fraction(rank.batch_share).limit_denominator(10**6) for rank in local]
    shares = {batch * part / sum(parts) for part in parts}
    counts = range(machine.nodes, max(most, machine.nodes) + 1)
    return [n for n in counts if n == machine.nodes or all((share / n).denominator == 1 for share in shares)]


def _offer(
    machine: Machine,
    job: _CheapestJob,
    usd: float,
    what: str,
    tokens: float,
    deadline_s: float | None,
    most_nodes: int,
) -> Offer:
    """Returns the offer with the fewest nodes that makes the deadline; if none does, the nearest offer. The number of
    nodes about doubles until the deadline is made or no larger number is left. Then bisection runs between the last
    number that was too slow or too small and the first number in time."""
    counts = _counts(machine, job.batch, most_nodes)
    rows: dict[int, Offer] = {}

    def ask(nodes: int) -> tuple[Offer, bool]:
        where = with_nodes(machine, nodes) if nodes != machine.nodes else machine
        rows[nodes], final = _so_many(where, job, usd, what, tokens, deadline_s)
        return rows[nodes], final

    at, below = 0, -1  # positions in counts; below: the last number that was too slow or too small
    row, final = ask(counts[0])
    while not row.in_time and not final and at + 1 < len(counts):
        below, at = at, min(bisect.bisect_left(counts, 2 * counts[at]), len(counts) - 1)
        row, final = ask(counts[at])
    while row.in_time and at - below > 1:
        middle = (at + below) // 2
        tried, _ = ask(counts[middle])
        if tried.in_time:
            at, row = middle, tried
        else:
            below = middle
    if not row.in_time:
        row = min((r for r in rows.values() if r.days is not None), key=lambda r: r.days or 0.0, default=row)
        if row.reason is None:
            row = replace(row, reason=f"too slow, and {_no_more(machine, job.batch, most_nodes)}")
    return replace(row, tried=tuple(sorted(rows)))


def _no_more(machine: Machine, batch: int, most_nodes: int) -> str:
    if machine.network is None:
        return "no network joins several nodes of it"
    if batch // machine.local_ranks <= most_nodes:
        return f"more GPUs cannot share {batch} sequences"
    return f"more than {most_nodes} nodes were not tried"


def _so_many(
    machine: Machine, job: _CheapestJob, usd: float, what: str, tokens: float, deadline_s: float | None
) -> tuple[Offer, bool]:
    """Returns the offer of one number of nodes, and whether its reason would be the same with more nodes."""
    base = Offer(
        machine=machine.name,
        nodes=machine.nodes,
        gpus=len(machine.ranks),
        usd_per_hour=usd * machine.nodes,
        price_of=what,
    )
    try:
        least_s = _least_s(machine, job, tokens)
        if deadline_s is not None and least_s > deadline_s:
            days = least_s / DAY_S
            reason = f"too slow: {days:.1f} days if it never waited for anything"
            return replace(base, least_days=days, reason=reason), False
        row, batch, micro_batches = _fastest(machine, job)
    except (DoesNotFit, CannotPlan) as error:
        return replace(base, reason=str(error)), False
    except (ModelError, UnknownName):
        raise
    except PstarError as error:
        return replace(base, reason=str(error)), True
    assert row.tokens_per_s is not None
    cost = bill(tokens, row.tokens_per_s, usd * machine.nodes)
    offer = replace(
        base,
        in_time=deadline_s is None or cost.days * DAY_S <= deadline_s,
        in_time_is_sure=deadline_s is None or abs(deadline_s / (cost.days * DAY_S) - 1) > (row.expected_error or 0.0),
        policy=row.policy,
        batch=batch,
        micro_batches=micro_batches,
        tokens_per_s=row.tokens_per_s,
        days=cost.days,
        usd=cost.usd,
        usd_per_million_tokens=cost.usd_per_million_tokens,
        expected_error=row.expected_error,
        trust=row.trust,
    )
    return offer, False


def _least_s(machine: Machine, job: _CheapestJob, tokens: float) -> float:
    """Returns the seconds of the matmuls alone, with a rank's sequences in one micro-batch, on the rank that takes
    longest."""
    workloads = job.workloads(machine, 1)
    every = sum(w.tokens for w in workloads)
    kinds = {(id(rank.gpu), id(w)): (r, w) for r, (rank, w) in enumerate(zip(machine.ranks, workloads))}
    layout = build_layout(workloads[0])
    slowest = max(sum(CostModel(w, machine, layout, rank=r).moments_s) for r, w in kinds.values())
    return slowest * tokens / every


def _fastest(machine: Machine, job: _CheapestJob) -> tuple[Row, int, int]:
    """Returns the fastest policy with the largest micro-batches that fit: (row, batch of all ranks, micro-batches).
    Room in memory is checked first, as in `fits`. If no policy fits, raises the last DoesNotFit or CannotPlan."""
    worst: PstarError | None = None
    for micro_batches in (n for n in range(1, min(job.batch, MOST_MOMENTS) + 1) if job.batch % n == 0):
        try:
            ranked = job.workloads(machine, micro_batches)
        except PstarError:
            if micro_batches == 1:
                raise
            continue
        alike = len({id(w) for w in ranked}) == 1
        hardest = ranked[0] if alike else tightest(ranked, machine)
        roomy, refusals = _with_room(hardest, machine, job)
        for error in refusals:
            worst = error if isinstance(error, DoesNotFit) or worst is None else worst
        if not roomy:
            continue
        answer = compare(
            ranked,
            machine,
            policies=roomy,
            settings=job.settings,
            loading=job.loading,
            barrier_cost=False,
            near=False,
        )
        if any(row.fits for row in answer.rows):
            return answer.best().row, answer.batch, micro_batches
    assert worst is not None
    raise worst


def _with_room(
    workload: Workload, machine: Machine, job: _CheapestJob
) -> tuple[list[str], list[DoesNotFit | CannotPlan]]:
    """Returns the policies that have room for the workload, and the errors that say why the others have none."""
    roomy: list[str] = []
    refusals: list[DoesNotFit | CannotPlan] = []
    for policy in job.policies or POLICIES:
        try:
            memory_need(policy, workload, machine, job.settings, loading=job.loading)
        except (DoesNotFit, CannotPlan) as error:
            refusals.append(error)
        else:
            roomy.append(policy)
    return roomy, refusals
