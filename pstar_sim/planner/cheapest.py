"""Cheapest: which machine trains a model on so many tokens by a deadline for least money.

Every machine that has a price, alone and, where a network joins its nodes, in counts that double; on each the sequences
of an iteration are shared by the ranks and cut into the largest micro-batches that some policy fits, and the fastest
policy counts. Data parallel only: what several nodes cost in communication is simulated; machines that no network joins
are not counted together, and tensor, pipeline or expert parallelism, the likely choice for models that fill many nodes,
is not modelled. Idle time, failures, evaluation and storage cost extra and are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pstar_sim.catalog.loader import load_machine, with_nodes
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.prices import Price, load_prices
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.errors import PstarError
from pstar_sim.planner.compare import Row, compare
from pstar_sim.planner.trust import trust
from pstar_sim.workload.lora import Adapter
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    import pandas

__all__ = ["Bill", "Cheapest", "Offer", "bill", "cheapest"]

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_NODES = 64
ONE_GPU = ("all_on_gpu", "zero_offload", "tide")
SEVERAL = ("all_on_gpu", "zero3_resident", "zero_offload", "zero3_offload", "tide")
"""Policies that are tried where none is named."""


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a number of tokens takes at a rate and a price."""

    days: float
    usd: float
    usd_per_million_tokens: float


def bill(tokens: float, tokens_per_s: float, usd_per_hour: float) -> Bill:
    """seconds = tokens / rate; USD = hours x price."""
    seconds = tokens / tokens_per_s
    usd = seconds / HOUR_S * usd_per_hour
    return Bill(days=seconds / DAY_S, usd=usd, usd_per_million_tokens=usd / tokens * 1e6)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One machine, so many of it. nodes: how many. in_time: it makes the deadline (or there is none). batch: sequences
    a micro-batch of one rank. price_of: the offer behind the price and its date. error, trust: of tokens_per_s, see
    `Fit`. least_days: what the matmuls alone take; where that is too long already nothing is planned. reason: why there
    are no figures, or why more nodes were not tried."""

    machine: str
    nodes: int
    gpus: int
    usd_per_hour: float
    price_of: str
    in_time: bool = False
    policy: str | None = None
    batch: int | None = None
    micro_batches: int | None = None
    tokens_per_s: float | None = None
    days: float | None = None
    usd: float | None = None
    usd_per_million_tokens: float | None = None
    error: float | None = None
    trust: str | None = None
    least_days: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Cheapest:
    """rows: offers that make the deadline, cheapest first; then those that do not, fastest first; then those without
    figures."""

    model: str
    tokens: float
    deadline_s: float | None
    rows: tuple[Offer, ...]

    @property
    def best(self) -> Offer | None:
        """The cheapest in time, None if none is."""
        return self.rows[0] if self.rows and self.rows[0].in_time else None

    def to_json(self) -> list[dict[str, object]]:
        return [asdict(row) for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        import pandas

        return pandas.DataFrame(self.to_json())

    def __repr__(self) -> str:
        text: str = importlib.import_module("pstar_sim.report.capacity").cheapest_text(self)
        return text


def cheapest(
    model: str,
    *,
    tokens: float,
    batch: int,
    seq: int,
    deadline_s: float | None = None,
    machines: Iterable[str | Machine] | None = None,
    policies: Sequence[str] | None = None,
    settings: Settings | None = None,
    dtype: str | None = None,
    checkpointing: bool = True,
    lora: Adapter | None = None,
    optimizer: str = "adamw",
    prices: str | None = None,
    most_nodes: int = MOST_NODES,
) -> Cheapest:
    """batch: sequences an iteration, all ranks and micro-batches together. machines: by default every machine with a
    price. prices: a file that comes before the shipped list. Raises PstarError for a model, machine or price that is
    none, and where no machine has a price."""
    if not tokens > 0:
        raise PstarError(f"tokens must be positive, not {tokens:g}")
    if deadline_s is not None and not deadline_s > 0:
        raise PstarError(f"a deadline must be a positive time, not {deadline_s:g} s")
    known = load_prices(prices)
    settings = settings or Settings()
    job = _Job(
        model,
        batch,
        seq,
        dtype,
        checkpointing,
        lora,
        optimizer,
        settings,
        None if policies is None else tuple(policies),
    )
    chosen = [load_machine(m) if isinstance(m, str) else m for m in (known if machines is None else machines)]
    rows: list[Offer] = []
    for machine in chosen:
        rows += _offers(machine, job, known, tokens, deadline_s, most_nodes)
    rows.sort(key=_rank)
    return Cheapest(model=model, tokens=tokens, deadline_s=deadline_s, rows=tuple(rows))


def _rank(row: Offer) -> tuple[float, ...]:
    if row.days is None or row.usd is None:
        return (2.0, row.least_days or float("inf"))
    return (0.0, row.usd) if row.in_time else (1.0, row.days)


@dataclass(frozen=True)
class _Job:
    model: str
    batch: int
    seq: int
    dtype: str | None
    checkpointing: bool
    lora: Adapter | None
    optimizer: str
    settings: Settings
    policies: tuple[str, ...] | None

    def workload(self, machine: Machine, batch: int, micro_batches: int) -> Workload:
        """Of one rank."""
        return preset(
            self.model,
            batch=batch,
            seq=self.seq,
            micro_batches=micro_batches,
            dtype=self.dtype or next((d for d in ("bf16", "fp16") if d in machine.gpu.flops_per_s), "fp32"),
            checkpointing=self.checkpointing,
            lora=self.lora,
            optimizer=self.optimizer,
        )


def _price_of(machine: Machine, prices: Mapping[str, Price]) -> tuple[float, str]:
    """(USD per hour of one node, what it is the price of). Raises PstarError if nobody knows."""
    price = prices.get(machine.name)
    if price is not None and (price.own or machine.price_usd_per_hour is None):
        when = "" if price.as_of is None else f", {price.as_of}"
        return price.usd_per_hour, f"{price.offer or price.source}{when}"
    if machine.price_usd_per_hour is not None:
        return machine.price_usd_per_hour / machine.nodes, "the machine's own entry"
    raise PstarError(
        f"machine {machine.name!r} has no price; give one with --prices FILE ([{machine.name}] usd_per_hour = ...) or "
        "--set price=..."
    )


def _offers(
    machine: Machine,
    job: _Job,
    prices: Mapping[str, Price],
    tokens: float,
    deadline_s: float | None,
    most_nodes: int,
) -> list[Offer]:
    """One node, and twice as many until the deadline is made or the batch gives out."""
    usd, what = _price_of(machine, prices)
    nodes, last = machine.nodes, None
    while True:
        where = with_nodes(machine, nodes) if nodes != machine.nodes else machine
        if job.batch % len(where.ranks) and last is not None:
            return [_with_reason(last, last.reason or "too slow, and more ranks cannot share the batch")]
        least_s = _least_s(where, job, tokens)
        if deadline_s is not None and least_s is not None and least_s > deadline_s:
            row = Offer(
                machine=where.name,
                nodes=nodes,
                gpus=len(where.ranks),
                usd_per_hour=usd * nodes,
                price_of=what,
                least_days=least_s / DAY_S,
                reason=f"too slow: {least_s / DAY_S:.1f} days if it never waited for anything",
            )
        else:
            row = _offer(where, job, usd, what, tokens, deadline_s)
        last = row
        if row.in_time or nodes * 2 > most_nodes:
            return [row]
        if machine.network is None:
            alone = "too slow alone, and no network joins several of it"
            return [row if row.reason else _with_reason(row, alone)]
        if row.reason is not None and "does not fit" not in row.reason and row.least_days is None:
            return [row]
        nodes *= 2


def _with_reason(row: Offer, reason: str) -> Offer:
    return replace(row, reason=reason)


def _offer(machine: Machine, job: _Job, usd: float, what: str, tokens: float, deadline_s: float | None) -> Offer:
    base = Offer(
        machine=machine.name,
        nodes=machine.nodes,
        gpus=len(machine.ranks),
        usd_per_hour=usd * machine.nodes,
        price_of=what,
    )
    found = _fastest(machine, job)
    if isinstance(found, str):
        return _with_reason(base, found)
    row, batch, micro_batches = found
    assert row.tokens_per_s is not None
    cost = bill(tokens, row.tokens_per_s, base.usd_per_hour)
    belief = trust(machine, row.policy)
    return Offer(
        machine=base.machine,
        nodes=base.nodes,
        gpus=base.gpus,
        usd_per_hour=base.usd_per_hour,
        price_of=base.price_of,
        in_time=deadline_s is None or cost.days * DAY_S <= deadline_s,
        policy=row.policy,
        batch=batch,
        micro_batches=micro_batches,
        tokens_per_s=row.tokens_per_s,
        days=cost.days,
        usd=cost.usd,
        usd_per_million_tokens=cost.usd_per_million_tokens,
        error=belief.error,
        trust=belief.label,
    )


def _least_s(machine: Machine, job: _Job, tokens: float) -> float | None:
    """Seconds of the matmuls alone, with a rank's sequences in one micro-batch; None if ranks cannot share them."""
    ranks = len(machine.ranks)
    if job.batch % ranks:
        return None
    workload = job.workload(machine, job.batch // ranks, 1)
    seconds = sum(CostModel(workload, machine, build_layout(workload)).moments_s)
    return seconds * tokens / (workload.tokens * ranks)


def _fastest(machine: Machine, job: _Job) -> tuple[Row, int, int] | str:
    """The fastest policy with the largest micro-batches that fit: (row, batch of a rank, micro-batches), or why not."""
    ranks = len(machine.ranks)
    if job.batch % ranks:
        return f"{job.batch} sequences cannot be shared evenly by {ranks} GPUs"
    share = job.batch // ranks
    worst = "no policy fits"
    policies = job.policies or (ONE_GPU if ranks == 1 else SEVERAL)
    for batch in sorted((n for n in range(1, share + 1) if share % n == 0), reverse=True):
        workload = job.workload(machine, batch, share // batch)
        try:
            answer = compare(
                workload, machine, policies=policies, settings=job.settings, barrier_cost=False, near=False
            )
        except PstarError as error:
            return str(error)
        if any(row.fits for row in answer.rows):
            return answer.best().row, batch, share // batch
        worst = next((row.reason for row in reversed(answer.rows) if row.reason), worst)
    return worst
