"""Balance: the job of a policy that chooses the ranks' shares of the batch itself (`Capabilities.balance`), if the GPUs
of the machine differ.

`balanced` gives the machine with the chosen shares, each rank's job, and words about the shares. All other policies
take the shares of the machine, which are equal unless its file gives others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pstar_sim.arguments import instance
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, DoesNotFit, PstarError
from pstar_sim.planner.batch_shares import Share, equal_shares, tightest
from pstar_sim.policy.kit.capabilities import capabilities_of
from pstar_sim.policy.kit.options import Specified
from pstar_sim.policy.registry import Policy, find_policy, policy_name
from pstar_sim.workload.presets import can_vary, variant
from pstar_sim.workload.workload import Workload

__all__ = ["Balanced", "Cut", "all_balance", "balanced", "refuse_balance"]

Cut = Callable[[int], Workload]
"""Function from a number of sequences per micro-batch to the job of a GPU that takes them."""


def refuse_balance(policies: Iterable[str | Policy], machine: Machine) -> None:
    """Raise PstarError for a policy that chooses the shares of the batch, for questions about the machine's own
    shares."""
    if not machine.mixed:
        return
    for policy in policies:
        if _balance_of(find_policy(policy) if isinstance(policy, str) else policy) is not None:
            raise PstarError(
                f"{policy_name(policy)} chooses each GPU's share of the batch on {machine.name}, and this question "
                "takes the shares of the machine; ask compare or plan for a given batch, or name another policy"
            )


def all_balance(policies: Iterable[str | Policy], machine: Machine) -> bool:
    """Returns whether each of these policies chooses the shares of the batch on this machine, so that the machine's own
    shares need not be whole sequences."""
    found = [find_policy(policy) if isinstance(policy, str) else policy for policy in policies]
    return machine.mixed and all(_balance_of(policy) is not None for policy in found)


def _balance_of(policy: Policy) -> Callable[..., tuple[int, ...]] | None:
    inner: Any = policy.policy if isinstance(policy, Specified) else policy
    found = capabilities_of(inner).balance
    return partial(found, **policy.values) if found is not None and isinstance(policy, Specified) else found


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """A job with the shares that a policy chose, and the same job with equal shares.

    even: equal shares, as nearly as whole sequences allow.
    """

    share: Share
    machine: Machine
    even: Share
    even_machine: Machine

    @property
    def words(self) -> str:
        """Sequences by GPU: "v100-16 19, p100-16 13"."""
        return _by_gpu(self.machine, self.share)

    @property
    def even_words(self) -> str:
        return _by_gpu(self.even_machine, self.even)


def balanced(
    policy: Policy, share: Share, machine: Machine, settings: Settings, cut: Cut | None = None
) -> Balanced | None:
    """Returns the job with the shares that the policy chooses; None if it chooses none or all GPUs are alike.

    cut: number of sequences -> the job of one GPU, for a job that was not written from a preset.

    Raises DoesNotFit if the GPUs have no room for the batch, and CannotPlan for a job that cannot be cut as the policy
    wants.
    """
    balance = _balance_of(policy)
    if balance is None or not machine.mixed:
        return None
    ranks = machine.data_parallel_size
    own = share.ranked or (share.workload,) * ranks
    known = {w.batch: w for w in own}

    def workload_of(sequences: int) -> Workload:
        if sequences not in known:
            known[sequences] = _cut(own[0], sequences, cut, policy_name(policy))
        return known[sequences]

    try:
        shares = balance(share.batch, machine, workload_of, settings)
    except DoesNotFit as short:
        raise short.restated(policy=policy_name(policy)) from short
    even = equal_shares(share.batch, ranks)
    (there, chosen), (even_machine, equal) = (_with(machine, row, workload_of) for row in (shares, even))
    return Balanced(share=chosen, machine=there, even=equal, even_machine=even_machine)


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
