"""Balance: the shares of the batch for policies that do not take those of the machine, if its GPUs differ.

A policy may choose the shares itself (`Capabilities.balance`), or be given those with which it is fastest
(`Capabilities.fastest_shares`). All others take the machine's, equal unless its file gives others. Every rank has at
least one sequence.

[Note: the fastest shares] The bound over shares (bounds/shares.py) gives shares in the order of their bounds. The first
are planned, at most MOST_PLANNED, until no shares that are left have a bound below the best plan. If none has room, the
last are those that leave most.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from pstar_sim.arguments import instance
from pstar_sim.bounds.shares import AnyShares, any_job, tightest
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, DoesNotFit, PstarError
from pstar_sim.planner.batch_shares import Share, equal_shares
from pstar_sim.policy.kit.capabilities import capabilities_of
from pstar_sim.policy.kit.options import Specified
from pstar_sim.policy.registry import Policy, find_policy, policy_name
from pstar_sim.workload.presets import can_vary, variant
from pstar_sim.workload.workload import Workload

MOST_PLANNED = 3

Cut = Callable[[int], Workload]
"""Function from a number of sequences per micro-batch to the job of a GPU that takes them."""


def refuse_balance(policies: Iterable[str | Policy], machine: Machine) -> None:
    """Raise PstarError for a policy that chooses the shares of the batch."""
    if not machine.mixed:
        return
    for policy in policies:
        if _balance_of(find_policy(policy) if isinstance(policy, str) else policy) is not None:
            raise PstarError(
                f"{policy_name(policy)} chooses each GPU's share of the batch on {machine.name}, and this question "
                "takes the shares of the machine; ask compare or plan for a given batch, or name another policy"
            )


def all_balance(policies: Iterable[str | Policy], machine: Machine) -> bool:
    """Whether each policy takes other shares than the machine's, which then need not be whole sequences."""
    return machine.mixed and all(chooses(policy) for policy in policies)


def chooses(policy: str | Policy) -> bool:
    """Whether the policy takes other shares of the batch than the machine's, if its GPUs differ."""
    found = find_policy(policy) if isinstance(policy, str) else policy
    return _balance_of(found) is not None or _wants_fastest(found)


def _wants_fastest(policy: Policy) -> bool:
    values = policy.values if isinstance(policy, Specified) else {}
    return capabilities_of(policy).fastest_shares and "shares" not in values


def _balance_of(policy: Policy) -> Callable[..., tuple[int, ...]] | None:
    found = capabilities_of(policy).balance
    return partial(found, **policy.values) if found is not None and isinstance(policy, Specified) else found


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """least_s: no plan with these shares is faster, as far as is known.
    even: as nearly as whole sequences allow.
    """

    least_s: float = 0.0
    share: Share
    machine: Machine
    even: Share
    even_machine: Machine

    @property
    def words(self) -> str:
        """Such as "v100-16 19, p100-16 13"."""
        return _by_gpu(self.machine, self.share)

    @property
    def even_words(self) -> str:
        return _by_gpu(self.even_machine, self.even)


def balances(
    policy: Policy,
    share: Share,
    machine: Machine,
    settings: Settings,
    cut: Cut | None = None,
    *,
    search: AnyShares | None = None,
) -> Iterator[Balanced]:
    """Yields the job with the shares to plan, the most promising first; none if the policy takes the machine's shares.

    cut: number of sequences -> the job of one GPU, where no preset is.
    search: for the fastest shares of this job, if known.

    Raises DoesNotFit if the GPUs have no room for the batch, and CannotPlan for a job that cannot be cut as the policy
    wants.
    """
    if not machine.mixed or not chooses(policy):
        return
    own = share.ranked or (share.workload,) * machine.data_parallel_size
    known = {w.batch: w for w in own}

    def job_of(sequences: int) -> Workload:
        if sequences not in known:
            known[sequences] = _cut(own[0], sequences, cut, policy_name(policy))
        return known[sequences]

    of = partial(_balanced, share.batch, machine, job_of)
    balance = _balance_of(policy)
    if balance is None:
        yield from _fastest(share, machine, settings, job_of, search, of)
        return
    try:
        shares = balance(share.batch, machine, job_of, settings)
    except DoesNotFit as short:
        raise short.restated(policy=policy_name(policy)) from short
    yield of(shares)


def _fastest(
    share: Share,
    machine: Machine,
    settings: Settings,
    job_of: Cut,
    search: AnyShares | None,
    of: Callable[..., Balanced],
) -> Iterator[Balanced]:
    if search is None:
        layout = build_layout(share.workload, chunk_bytes=settings.chunk_bytes, ranks=machine.data_parallel_size)
        search = AnyShares(share.batch, machine, settings, layout, any_job(share.workload, machine) or job_of)
    given: set[tuple[int, ...]] = set()
    try:
        for leaf in islice(search.leaves(), MOST_PLANNED):
            if leaf.shares not in given:
                given.add(leaf.shares)
                yield of(leaf.shares, least_s=leaf.bound.seconds)
        last = roomiest(share.batch, machine, job_of)
    except CannotPlan:
        return
    if last not in given:
        yield of(last)


def roomiest(batch: int, machine: Machine, job_of: Cut) -> tuple[int, ...]:
    """Each sequence goes to the GPU that then has most room. Raises CannotPlan for fewer sequences than ranks."""
    ranks = machine.ranks
    if batch < len(ranks):
        raise CannotPlan(f"{batch} sequences for {len(ranks)} ranks; give each rank at least one")
    one, two = (max(m.peak_bytes for m in job_of(n).moments) for n in (1, min(2, batch)))
    full = [(two - rank.gpu.budget_bytes, r) for r, rank in enumerate(ranks)]
    heapq.heapify(full)
    shares = [1] * len(ranks)
    for _ in range(batch - len(ranks)):
        size, r = full[0]
        shares[r] += 1
        heapq.heapreplace(full, (size + two - one, r))
    return tuple(shares)


def roomiest_job(batch: int, machine: Machine, job_of: Cut) -> Workload:
    return tightest([job_of(n) for n in roomiest(batch, machine, job_of)], machine)


def _balanced(batch: int, machine: Machine, job_of: Cut, shares: Sequence[int], *, least_s: float = 0.0) -> Balanced:
    even = equal_shares(batch, machine.data_parallel_size)
    (there, chosen), (even_machine, equal) = (_with(machine, row, job_of) for row in (shares, even))
    return Balanced(least_s=least_s, share=chosen, machine=there, even=equal, even_machine=even_machine)


def _cut(workload: Workload, sequences: int, cut: Cut | None, policy: str) -> Workload:
    if cut is None and can_vary(workload) and not workload.activations:
        return variant(workload, batch=sequences)
    wanted = f"{policy}: a GPU would take {sequences} sequences of a micro-batch"
    if cut is None:
        why = "keeps its activations block by block" if can_vary(workload) else "was not written from a preset"
        raise CannotPlan(
            f"{wanted}, and {workload.model!r} cannot be cut: it {why}; give compare(cut=...), a function from a "
            "number of sequences to their job"
        )
    try:
        return instance(f"cut({sequences})", cut(sequences), Workload, f"a Workload of {sequences} sequences")
    except PstarError as error:
        raise CannotPlan(f"{wanted}: {error}") from error


def _with(machine: Machine, shares: Sequence[int], workload_of: Callable[[int], Workload]) -> tuple[Machine, Share]:
    batch = sum(shares)
    ranks = tuple(replace(rank, batch_share=n / batch) for rank, n in zip(machine.ranks, shares))
    there = replace(machine, ranks=ranks)
    ranked = tuple(workload_of(n) for n in shares)
    share = Share(workload=tightest(ranked, there), ranked=ranked, batch=batch, tokens=sum(w.tokens for w in ranked))
    return there, share


def _by_gpu(machine: Machine, share: Share) -> str:
    assert share.ranked is not None
    rows: dict[str, list[int]] = {}
    for rank, w in zip(machine.ranks, share.ranked):
        rows.setdefault(rank.gpu.name, []).append(w.batch)
    return ", ".join(f"{gpu} {'+'.join(map(str, taken))}" for gpu, taken in rows.items())
