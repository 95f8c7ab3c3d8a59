"""Whether a policy has room for a job, and the least it needs of each place: `memory_need` without a plan if possible,
`with_room` with one.

[Note: what the host really has to give] A plan counts payloads. A machine has to give more:

- pinned rounding: slabs are powers of two (core/slabs.py, the executor's own rule);
- start-up: weights lie beside the slabs until all are in their chunks or on the GPU, loaded as the job says
  (`workload.loading`; the executor checks the same). With one memory, a job that keeps nothing on the host needs none:
  the GPU's is more than twice its weights' bytes.
- the policy's own buffers, taken when start-up ends, so the larger of the two counts;
- with disks, what a run takes beside (core/workspace.py).

If a plan takes too much, the policy plans for a host with less memory (`with_room`), unless its plans count all of this
(`Capabilities.counts_host`).

[Note: less of the host, more on disks] With disks, the smallest plan is that for the least memory for which the policy
plans at all, which refusals of the host name. If it has no room, none has, and its need is the answer. If it has, plans
made without a search (ANY_PLAN) look for the most memory with room, until 1 / 2 ** CLOSE of the host is left or HALVES
plans are made. The policy searches for that memory alone, with the chunk size that pinning rounds up least.

[Note: payloads that pass through the host] A plan that uses disks needs slabs for the payloads that never leave the
host and, for those that pass through it, the pool of core/slabs.py, to which the executor adds rooms where the disks
fall behind: the simulated peak less permanent payloads, the policy's host buffers and the pool.

The asynchronous policies know their needs before they plan (policy/kit/job.py): pins are what a host has no room for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pstar_sim.catalog.machine import Gpu, Machine
from pstar_sim.core.ledger import PLACES, Holdings
from pstar_sim.core.plan import ANY_PLAN, STASHES, Plan, Settings
from pstar_sim.core.slabs import host_payloads, is_room, pack_slabs, pool_key, stash_key
from pstar_sim.core.step import Place
from pstar_sim.core.workspace import (
    WORKSPACE,
    beside_workspace,
    beyond_all,
    planned_beside_workspace,
    with_host_budget,
    workspace_bytes,
)
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy.family.pins import least_budget, most_pins_of
from pstar_sim.policy.family.searched import jobs_of_sizes
from pstar_sim.policy.kit.capabilities import Capabilities
from pstar_sim.policy.kit.facts import facts_of
from pstar_sim.policy.kit.iteration_order import in_order
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.kit.sharing import once_for_steps, plan_once
from pstar_sim.policy.optimal import leaves_out
from pstar_sim.policy.passes.feasibility import check_gpu, check_host
from pstar_sim.policy.registry import Policy, built_in, can, find_policy, policy_name
from pstar_sim.sim.play import play
from pstar_sim.units import format_bytes
from pstar_sim.workload.loading import WHOLE, Loading
from pstar_sim.workload.workload import Workload

MOST_SHORT = 6  # refusals in a row: payloads, rounding and start-up of the host, then the GPU
HALVES = 5  # plans between one that has room and one that has none
OTHERS = tuple(built_in())  # that a policy may try
_REFUSED = ("refused",)  # key of `Workload.derived`
CLOSE = 6  # a plan that leaves 1 / 2 ** CLOSE of the host is close enough


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a job's life.

    name: "loading", "first step" (and every other step), "saving" or "resuming".
    host_bytes: on one node, of all its ranks; None where they are not counted.
    what: words for what comes beside the memory of the steps; "" for nothing.
    instead: value of a configuration with which less comes beside it; "" if there is none.
    pinned_bytes: of these, on one node.
    """

    name: str
    host_bytes: int | None
    what: str = ""
    instead: str = ""
    pinned_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Need:
    """Host memory of each rank: [Note: what the host really has to give].

    pinned_bytes: the payloads in slabs, rounded.
    startup_bytes: weights while they are loaded.
    workspace_bytes: [Note: beside payloads] in core/workspace.py.
    pins: chunks that stay on the GPU, None if only a plan knows.
    """

    policy: str
    payload_bytes: int
    pinned_bytes: int
    startup_bytes: int
    buffer_bytes: int = 0
    workspace_bytes: int = 0
    loading: str = ""
    pins: int | None = None
    plan: Plan | None = None

    @property
    def host_bytes(self) -> int:
        return self.pinned_bytes + self.workspace_bytes + max(self.startup_bytes, self.buffer_bytes)

    def phases(self, local_ranks: int) -> tuple[Phase, ...]:
        """The executor writes and reads checkpoints tensor by tensor, without a second copy (executor/saving)."""
        always = self.pinned_bytes + self.workspace_bytes
        loading = (always + self.startup_bytes) * local_ranks
        steps = (always + self.buffer_bytes) * local_ranks
        what = f"the weights, {self.loading or 'whole'}"
        return (
            Phase(name="loading", host_bytes=loading, what=what),
            Phase(name="first step", host_bytes=steps),
            Phase(name="saving", host_bytes=steps),
            Phase(name="resuming", host_bytes=max(loading, steps), what=what if loading > steps else ""),
        )


def shortage(
    policy: str | Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    loading: Loading = WHOLE,
    others: Sequence[str] | None = OTHERS,
) -> DoesNotFit | None:
    """Why the policy has no room; None if it has.

    loading, others: as in `memory_need`.
    """
    known = _refused(workload, machine, settings, loading) if others is OTHERS else {}
    if policy not in known:
        try:
            memory_need(policy, workload, machine, settings, loading=loading, others=others, fewest=False)
        except DoesNotFit as short:
            known[policy] = short.restated()  # whose frames hold nothing
    return known.get(policy)


_Refusals = dict[str | Policy, DoesNotFit]


def _refused(workload: Workload, machine: Machine, settings: Settings, loading: Loading) -> _Refusals:
    known = workload.derived.setdefault(_REFUSED, {})
    assert isinstance(known, dict)
    _, refusals = known.setdefault((id(machine), settings, loading), (machine, _Refusals()))
    found: _Refusals = refusals  # the machine is kept, so no other has its id
    return found


def with_room(
    plan_with: Callable[[Machine, Settings], Plan],
    policy: str | Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    loading: Loading = WHOLE,
) -> Plan:
    """A plan that the host has room to run ([Note: what the host really has to give]). Raises DoesNotFit."""

    def planner(asked: Settings) -> Callable[[Machine], Plan]:
        return lambda where: plan_with(where, asked)

    plan_on, able = planner(settings), can(policy)
    if machine.nvme is not None and not able.counts_host:

        def from_disks(inside: Machine) -> Plan:
            if settings.any_will_do or not able.searches:
                return _from_disks(plan_on, plan_on, inside, loading)
            if _may_have_room(policy, workload, inside, settings, loading):
                plan = plan_on(inside)
                if _shortage_of(plan, inside, loading) is None:
                    return plan
            rounded = replace(settings, chunk_bytes=_least_rounded(policy, workload, inside, settings))
            plan = _from_disks(planner(rounded), planner(replace(rounded, effort=ANY_PLAN)), inside, loading)
            return replace(plan, settings=settings)

        return planned_beside_workspace(from_disks, workload, machine)
    plan = plan_on(machine)
    if able.counts_host:
        return plan
    refusal = _shortage_of(plan, machine, loading)
    smaller = _shrunk(plan_on, plan, machine, loading)
    if smaller is not None:
        return smaller
    if able.point is not None:
        # its own need, with as little on the host as it can do with, is the reason or a last chance
        need = memory_need(policy, workload, machine, settings, loading=loading, others=None, fewest=False)
        smaller = _planned_within(plan_on, machine, need.payload_bytes)
        if smaller is not None and _shortage_of(smaller, machine, loading) is None:
            return _moved(smaller, machine)
    assert refusal is not None
    raise refusal


def _may_have_room(
    policy: str | Policy, workload: Workload, machine: Machine, settings: Settings, loading: Loading
) -> bool:
    """Of the whole host, without the disks' help."""
    able = can(policy)
    if able.point is None:
        startup_bytes = loading.startup_bytes(workload, machine.local_ranks)
        return not beyond_all(workload, machine, disks=False, beside_bytes=startup_bytes)
    try:
        _own_need(policy_name(policy), able, workload, machine, settings, loading, fewest=False)
    except DoesNotFit:
        return False
    return True


def _least_rounded(policy: str | Policy, workload: Workload, machine: Machine, settings: Settings) -> int | None:
    """The chunk size, of a search's, whose payloads pinning rounds up least."""
    able = can(policy)
    if able.point is None or not able.tries_others or settings.chunk_bytes is not None:
        return settings.chunk_bytes

    def rounded(job: Job) -> float:
        payloads = _payloads(job, 0)
        return pack_slabs(payloads.items()).total_bytes / max(1, sum(payloads.values()))

    jobs = jobs_of_sizes(policy_name(policy), workload, machine, settings, able.point)
    return min(jobs, key=rounded).layout.chunk_bytes


def _shrunk(plan_on: Callable[[Machine], Plan], plan: Plan, machine: Machine, loading: Loading) -> Plan | None:
    """The plan, or one for less, with room, or None."""
    budget_bytes, short = machine.host_budget_bytes, _shortage_of(plan, machine, loading)
    for _ in range(MOST_SHORT):
        if short is None:
            return plan if budget_bytes == machine.host_budget_bytes else _moved(plan, machine)
        budget_bytes -= short.short_bytes
        smaller = _planned_within(plan_on, machine, budget_bytes)
        if smaller is None:
            break
        plan, short = smaller, _shortage_of(smaller, machine, loading)
    return None


def _from_disks(
    plan_on: Callable[[Machine], Plan],
    any_on: Callable[[Machine], Plan],
    machine: Machine,
    loading: Loading,
) -> Plan:
    """[Note: less of the host, more on disks]. Raises DoesNotFit.

    any_on: without a search.
    """
    try:
        budget_bytes, need = _most_on_host(any_on, machine, loading)
    except DoesNotFit:
        if any_on is plan_on:
            raise
        any_on = plan_on  # a search may find other chunk sizes or policies that have room
        budget_bytes, need = _most_on_host(plan_on, machine, loading)
    found = need.plan
    assert found is not None
    for _ in range(MOST_SHORT if any_on is not plan_on else 0):
        best = _planned_within(plan_on, machine, budget_bytes)
        if best is None or (short := _shortage_of(best, machine, loading)) is None:
            found = best or found
            break
        budget_bytes -= short.short_bytes
    return found if found.machine is machine else _moved(found, machine)


def _most_on_host(
    plan_on: Callable[[Machine], Plan],
    machine: Machine,
    loading: Loading,
    *,
    startup_bytes: int | None = None,
    asked: bool = True,
) -> tuple[int, Need]:
    """Host budget, and the need of the plan for it that has room on the machine. Raises DoesNotFit.

    startup_bytes: of the loading, where any plan that has room will do.
    """
    whole = high = machine.host_budget_bytes
    refused, budget_bytes, named = 0, 1, False
    short: DoesNotFit | None = None
    latest: DoesNotFit | None = None
    if asked:
        plan = plan_on(machine)
        if startup_bytes is None or not _surely_short(plan, loading):
            need = need_of_plan(plan, loading)
            if (short := host_shortage(need, machine)) is None:
                return whole, need
            budget_bytes = max(1, whole - short.short_bytes) if startup_bytes is None else 1
    for _ in range(2 * MOST_SHORT):
        try:
            need = need_of_plan(plan_on(with_host_budget(machine, budget_bytes)), loading)
        except DoesNotFit as refusal:
            latest, refused, wanted_bytes = refusal, budget_bytes, _wanted_bytes(refusal, budget_bytes)
            of_host, between = refusal.place == "host", refused < wanted_bytes < high
            named = of_host and between
            budget_bytes = wanted_bytes if between else (refused + high) // 2
            if not named and short is None:
                need = need_of_plan(plan_on(machine), loading)
                if (short := host_shortage(need, machine)) is None:
                    return whole, need
            if of_host and wanted_bytes >= high:
                break
            if startup_bytes is not None and named:
                most = _at_most(refusal, startup_bytes)
                if most.host_bytes <= whole:
                    return wanted_bytes, most
            continue
        if (still := host_shortage(need, machine)) is None:
            if startup_bytes is not None:
                return budget_bytes, need
            return _nearest_the_whole(plan_on, machine, loading, budget_bytes, need, high, short)
        short, high = still, budget_bytes
        if named or high - refused <= 1:
            break
        budget_bytes = (refused + high) // 2
    reason = short or latest
    assert reason is not None
    raise reason


def _nearest_the_whole(
    plan_on: Callable[[Machine], Plan],
    machine: Machine,
    loading: Loading,
    low: int,
    need: Need,
    high: int,
    short: DoesNotFit | None,
) -> tuple[int, Need]:
    """low, need: of a plan that has room.
    high, short: of one that has none.
    """
    whole = machine.host_budget_bytes
    over_bytes = 0 if short is None else short.short_bytes
    for _ in range(HALVES):
        left_bytes = whole - need.host_bytes
        if left_bytes <= whole >> CLOSE:
            break
        aim_bytes = left_bytes - (whole >> CLOSE + 1)  # where what is left would be half of that
        times = aim_bytes / (left_bytes + over_bytes) if over_bytes else 0.5
        budget_bytes = low + round((high - low) * times)
        more = _planned_within(plan_on, machine, budget_bytes)
        more_need = None if more is None else need_of_plan(more, loading)
        if more_need is not None and host_shortage(more_need, machine) is None:
            low, need = budget_bytes, more_need
        else:
            high = budget_bytes
            over_bytes = 0 if more_need is None else more_need.host_bytes - whole
    return low, need


def _surely_short(plan: Plan, loading: Loading) -> bool:
    """Without a simulation and slabs."""
    w, machine = plan.workload, plan.machine
    beside = max(_buffer_bytes(plan), 0 if machine.unified else loading.startup_bytes(w, machine.local_ranks))
    return sum(host_payloads(plan).values()) + beside > machine.host_budget_bytes


def _at_most(refusal: DoesNotFit, startup_bytes: int) -> Need:
    """Slabs are less than twice their contents."""
    size_bytes = refusal.needed_bytes
    return Need(
        policy=refusal.policy,
        payload_bytes=size_bytes,
        pinned_bytes=2 * size_bytes,
        startup_bytes=startup_bytes,
        buffer_bytes=size_bytes,
    )


def _wanted_bytes(refusal: DoesNotFit, budget_bytes: int) -> int:
    """Of the host, named or guessed by a refusal with this budget."""
    return {"host": refusal.needed_bytes, "nvme": budget_bytes + refusal.short_bytes}.get(refusal.place, 0)


def _planned_within(plan_on: Callable[[Machine], Plan], machine: Machine, budget_bytes: int) -> Plan | None:
    if budget_bytes <= 0:
        return None
    try:
        return plan_on(with_host_budget(machine, budget_bytes))
    except DoesNotFit:
        return None


def _moved(plan: Plan, machine: Machine) -> Plan:
    return replace(plan, machine=machine, host_budget_bytes=machine.host_budget_bytes)


def _shortage_of(plan: Plan, machine: Machine, loading: Loading) -> DoesNotFit | None:
    return host_shortage(need_of_plan(plan, loading), machine)


def never_fits(workload: Workload, machine: Machine, loading: Loading) -> bool:
    """Whether weights and states surely take more than all places have."""
    beside_bytes = (
        0 if machine.unified or machine.nvme is not None else loading.startup_bytes(workload, machine.local_ranks)
    )
    return beyond_all(workload, machine, beside_bytes=beside_bytes)


def memory_need(
    policy: str | Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    loading: Loading = WHOLE,
    others: Sequence[str] | None = OTHERS,
    fewest: bool = True,
    refused: bool = True,
) -> Need:
    """Returns the needs on the host. Raises DoesNotFit, even if only rounding or start-up is too much.

    others: a policy that tries others, without room itself, has the need of the first of these with room. None: its
        own alone.
    fewest: find the fewest pins, and the policy's own plan; False takes any that fit.
    refused: False for the need of a plan that the host has no room for, too.
    """
    able = can(policy)
    refusal: DoesNotFit | None = None
    if able.point is not None:
        try:
            return _own_need(policy_name(policy), able, workload, machine, settings, loading, fewest=fewest)
        except DoesNotFit as short:
            if not (able.tries_others and others is not None) and (machine.nvme is None or short.place == "gpu"):
                raise
            if never_fits(workload, machine, loading):
                raise
            refusal = short
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "policy")
    asked_of = others if able.tries_others and refusal is not None else None

    def need_of_others() -> Need | None:
        known = {} if fewest else _refused(workload, machine, settings, loading)
        untried = (one for one in asked_of or () if one != policy and one not in known)
        rest = [one for one in untried if not leaves_out(one, workload, machine, settings)]
        return _need_of_any(rest, workload, machine, settings, loading, fewest)

    if not fewest and (need := need_of_others()):
        return replace(need, policy=name)
    asked = settings if fewest else replace(settings, effort=ANY_PLAN)
    function = find_policy(policy) if isinstance(policy, str) else policy
    try:
        on_disks = machine.nvme is not None and not able.counts_host

        def plan_on(where: Machine) -> Plan:
            return plan_once(function, workload, where, asked)

        if on_disks and not fewest:
            startup_bytes = loading.startup_bytes(workload, machine.local_ranks)

            def need_on(where: Machine) -> Need:
                any_will_do = None if where is machine else startup_bytes  # of the whole host, with its plan
                whole = refusal is None and not beyond_all(workload, where, disks=False)
                return _most_on_host(plan_on, where, loading, startup_bytes=any_will_do, asked=whole)[1]

            def on_disks_of(found: Need) -> bool:
                return found.plan is None or found.plan.nvme_budget_bytes > 0

            need = beside_workspace(need_on, workload, machine, on_disks_of)
            if on_disks_of(need):
                need = replace(need, workspace_bytes=workspace_bytes(workload))
        elif on_disks:
            plan_with = partial(plan_once, function, workload)
            plan = with_room(plan_with, policy, workload, machine, settings, loading=loading)
            need = need_of_plan(plan, loading)
        else:
            if refusal is not None and not fewest and not machine.unified:
                # where weights are loaded beside them, lists on the host have no more
                room_bytes = machine.host_budget_bytes - loading.startup_bytes(workload, machine.local_ranks)
                plan_on(with_host_budget(machine, max(1, room_bytes)))
            need = need_of_plan(plan_on(machine), loading)
        if refused and not able.counts_host:
            _check_host(need, machine)
    except DoesNotFit:
        if refusal is None or machine.nvme is not None:
            raise
        of_others = need_of_others() if fewest else None
        if of_others is None:
            raise refusal from None
        need = of_others
    return replace(need, policy=name)


def _need_of_any(
    policies: Iterable[str], workload: Workload, machine: Machine, settings: Settings, loading: Loading, fewest: bool
) -> Need | None:
    for one in policies:
        try:
            return memory_need(one, workload, machine, settings, loading=loading, fewest=fewest)
        except PstarError:  # the policy does not fit, or does not apply to this machine
            continue
    return None


def need_of_plan(plan: Plan, loading: Loading = WHOLE) -> Need:
    sizes, pins = once_for_steps(plan, _host_sizes), plan.modes.count("pin")
    need = _need(plan.policy, sizes, plan.workload, plan.machine, loading, pins=pins)
    return replace(need, buffer_bytes=_buffer_bytes(plan), workspace_bytes=_workspace_bytes(plan), plan=plan)


def _need(
    name: str,
    sizes: Mapping[tuple[int, str], int],
    workload: Workload,
    machine: Machine,
    loading: Loading,
    *,
    pins: int,
) -> Need:
    return Need(
        policy=name,
        payload_bytes=sum(sizes.values()),
        pinned_bytes=pack_slabs(sizes.items()).total_bytes,
        startup_bytes=loading.startup_bytes(workload, machine.local_ranks) if sizes or not machine.unified else 0,
        loading=loading.words(machine.local_ranks, workload.tensors),
        pins=pins,
    )


def _host_sizes(plan: Plan) -> dict[tuple[int, str], int]:
    sizes = host_payloads(plan)
    if not (rooms := sum(map(is_room, sizes))):
        return sizes
    most = play(plan).peak_bytes["host"] - _buffer_bytes(plan) - _workspace_bytes(plan) - sum(sizes.values())
    return sizes | {pool_key(rooms): max(0, most)}


def _buffer_bytes(plan: Plan) -> int:
    beside = (STASHES, WORKSPACE)
    return sum(size for name, place, size in plan.buffers if place is Place.HOST and name not in beside)


def _workspace_bytes(plan: Plan) -> int:
    return sum(size for name, _, size in plan.buffers if name == WORKSPACE)


def host_shortage(need: Need, machine: Machine) -> DoesNotFit | None:
    budget = machine.host_budget_bytes
    if need.host_bytes <= budget:
        return None
    parts = [f"{format_bytes(need.payload_bytes)} of payloads"] if need.payload_bytes else []
    if need.pinned_bytes > need.payload_bytes:
        parts.append(f"{format_bytes(need.pinned_bytes - need.payload_bytes)} by which pinning rounds them up")
    if need.workspace_bytes:
        parts.append(f"{format_bytes(need.workspace_bytes)} that a run with disks takes beside")
    if need.buffer_bytes > need.startup_bytes:
        parts.append(f"{format_bytes(need.buffer_bytes)} of the policy's own buffers")
    elif need.startup_bytes:
        how = f", {need.loading}" if need.loading else ""
        parts.append(f"{format_bytes(need.startup_bytes)} of weights while they are loaded{how}")
    return DoesNotFit(
        policy=need.policy,
        place="host",
        needed_bytes=need.host_bytes,
        available_bytes=budget,
        what=", ".join(parts),
    )


def disk_shortage(need: Need, machine: Machine) -> DoesNotFit | None:
    budget = machine.nvme_budget_bytes
    needed = 0 if need.plan is None or machine.nvme is None else play(need.plan).peak_bytes.get("nvme", 0)
    if needed <= budget:
        return None
    return DoesNotFit(
        policy=need.policy,
        place="nvme",
        needed_bytes=needed,
        available_bytes=budget,
        what="lists for which the host has no room",
    )


def _check_host(need: Need, machine: Machine) -> None:
    short = host_shortage(need, machine)
    if short is not None:
        raise short


# The asynchronous policies.


def _own_need(
    name: str,
    able: Capabilities,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    loading: Loading,
    *,
    fewest: bool,
) -> Need:
    """At the usual chunk size, or (not `fewest`) of the first size with room. Raises DoesNotFit for the usual size."""
    refusal: DoesNotFit | None = None
    for job in _own_jobs(name, able, workload, machine, settings, usual=fewest):
        try:
            check_gpu(job)
            return _asynchronous_need(job, machine, loading, fewest=fewest)
        except DoesNotFit as short:
            refusal = refusal or short
            if never_fits(workload, machine, loading):
                break
    assert refusal is not None
    raise refusal


def _own_jobs(
    name: str, able: Capabilities, workload: Workload, machine: Machine, settings: Settings, *, usual: bool
) -> Iterable[Job]:
    """Of the usual chunk size, or of each that is tried."""
    assert able.point is not None
    if able.tries_others and not usual:
        return jobs_of_sizes(name, workload, machine, settings, able.point)
    return (Job(name, in_order(name, workload, able.point.order), machine, settings, able.point),)


def bytes_of_pins(
    policy: str, workload: Workload, machine: Machine, settings: Settings, loading: Loading = WHOLE
) -> int | None:
    """Least GPU bytes for the pins that the host asks for, over chunk sizes; None if only plans tell."""
    able, found = can(policy), list[int]()
    if able.point is None:
        return None
    for job in _own_jobs(policy_name(policy), able, workload, machine, settings, usual=False):
        with suppress(DoesNotFit):
            found.append(least_budget(job, _asynchronous_need(job, machine, loading, fewest=True).pins or 0))
    return min(found, default=None)


def _asynchronous_need(job: Job, machine: Machine, loading: Loading, *, fewest: bool) -> Need:
    """By bisection: more pins never need more of the host. Raises DoesNotFit if it is short.

    fewest: False stops at no pins or the most.
    """

    def need(pins: int) -> Need:
        return _need(job.name, _payloads(job, pins), job.workload, machine, loading, pins=pins)

    budget = machine.host_budget_bytes
    low, high = 0, most_pins_of(job)
    check_host(job, Modes(frozenset(job.candidates[:high])))
    if sum(_payloads(job, 0).values()) <= budget:  # slabs are never smaller than their contents
        best = need(0)
        if best.host_bytes <= budget:
            return best
    best = need(high)
    _check_host(best, machine)
    while fewest and high - low > 1:
        middle = (low + high) // 2
        tried = need(middle)
        if tried.host_bytes <= budget:
            high, best = middle, tried
        else:
            low = middle
    return best


def _payloads(job: Job, pins: int) -> dict[tuple[int, str], int]:
    pinned = frozenset(job.candidates[:pins])
    sizes = {
        (c, name): job.layout.payload_bytes(c, name)
        for c in job.moving
        if c not in pinned
        for name in job.uses.home_lists(c)
    }
    sizes |= {stash_key(block): size for block, size in job.workload.stash_room}
    if job.several and not job.sums_on_gpu:
        sizes |= {(c, "grad"): job.layout.payload_bytes(c, "grad") for c in job.candidates if c not in pinned}
    return sizes


# If there is no room.


@dataclass(frozen=True, kw_only=True)
class Roomy:
    """A machine with room for a job that did not fit.

    gpu_shortage: why the original GPU has none.
    """

    machine: Machine
    need: Need
    gpu_shortage: DoesNotFit | None


def need_with_room(
    policy: str | Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    short: DoesNotFit,
    *,
    loading: Loading = WHOLE,
) -> Roomy | None:
    """Adds just enough to each short place, to disks all states. None if that does not help."""
    roomy, error = machine, short
    gpu: DoesNotFit | None = None
    for _ in range(MOST_SHORT):
        if error.place == "gpu":
            roomy, gpu = _with_gpu_budget(roomy, error.needed_bytes), error
        elif error.place == "host":
            roomy = with_host_budget(roomy, error.needed_bytes)
        elif error.place == "nvme" and with_large_disks(workload, roomy) is not roomy:
            roomy = with_large_disks(workload, roomy)
        else:
            return None
        try:
            asked = replace(settings, effort=ANY_PLAN)
            need = memory_need(policy, workload, roomy, asked, loading=loading, others=None, refused=False)
        except DoesNotFit as still:
            error = still
            continue
        if need.host_bytes > roomy.host_budget_bytes:
            roomy = with_host_budget(roomy, need.host_bytes)
        gpu_shortage = None if gpu is None else gpu.restated(available_bytes=machine.gpu_budget_bytes)
        return Roomy(machine=roomy, need=need, gpu_shortage=gpu_shortage)
    return None


def with_large_disks(workload: Workload, machine: Machine) -> Machine:
    """Disks get room for at least twice all states."""
    size_bytes = 2 * workload.states_bytes
    if machine.nvme is None or machine.nvme.memory_bytes >= size_bytes:
        return machine
    return replace(machine, nvme=replace(machine.nvme, memory_bytes=size_bytes))


# The GPU's side.


def least_gpu_bytes(
    ask: Callable[[Machine], DoesNotFit | None],
    machine: Machine,
    known_bytes: int | None = None,
    least_bytes: int | None = None,
) -> int:
    """Of each GPU, with which a job that fits still fits.

    known_bytes: that do.
    least_bytes: the answer if the host is short with less and these do.

    A refusal names the least GPU bytes, which are asked next. If the host is short, what it lacks is added, to
    1 / 512.
    """
    low, high = 1, machine.gpu_budget_bytes if known_bytes is None else known_bytes
    error: DoesNotFit | None
    for _ in range(MOST_SHORT):
        error = ask(_with_gpu_budget(machine, low))
        if error is None:
            return low
        if error.place == "gpu" and known_bytes is not None and error.needed_bytes >= known_bytes:
            return known_bytes
        if error.place != "gpu" or not low < error.needed_bytes <= high:
            break
        low = error.needed_bytes
    if least_bytes is not None and low < least_bytes:
        if least_bytes >= high or ask(_with_gpu_budget(machine, least_bytes)) is None:
            return min(least_bytes, high)
    within = step = max(10**7, high // 512)
    times = 1
    while high - low > within:
        if error is None:
            middle, step = high - step, 2 * step
        else:
            middle, times = low + times * error.short_bytes, 2 * times
        if (error is not None and error.place != "host") or not low < middle < high:
            middle = (low + high) // 2
        error = ask(_with_gpu_budget(machine, middle))
        if error is None:
            high = middle
        else:
            low, step = middle, within
    return high


def gpu_bytes_in_order(plan: Plan) -> int:
    """While steps run one by one."""
    tide = facts_of(plan.workload, plan.layout).tide
    holdings = Holdings(plan.layout, plan.initial, plan.buffers, tide)
    for step in plan.steps:
        holdings.run(step)
    return holdings.peak_bytes[PLACES.index(Place.GPU)]


def _with_gpu_budget(machine: Machine, budget_bytes: int) -> Machine:
    def resized(gpu: Gpu) -> Gpu:
        usable = gpu.context_bytes + budget_bytes
        return replace(gpu, usable_bytes=usable, memory_bytes=max(usable, gpu.memory_bytes))

    return replace(machine, ranks=tuple(replace(rank, gpu=resized(rank.gpu)) for rank in machine.ranks))
