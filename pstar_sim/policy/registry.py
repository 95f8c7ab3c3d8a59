"""Policies by name, built in or of entry points `pstar.policies`, with options: `tide:capacity=peak,adam=fifo`
(options.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.workspace import planned_beside_workspace
from pstar_sim.errors import CannotPlan, PstarError, UnknownName
from pstar_sim.policy.kit.capabilities import Capabilities, capabilities_of
from pstar_sim.policy.kit.options import Specified, specified, split_spec
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.optimal import optimal
from pstar_sim.policy.shipped import AFTER_OPTIMAL, BEFORE_OPTIMAL, Policy
from pstar_sim.words import letters
from pstar_sim.workload.orders import Order
from pstar_sim.workload.workload import Workload

__all__ = [
    "ENTRY_POINTS", "STAGED", "Policy", "built_in", "can", "can_follow", "find_policy", "is_built_in", "keeps_order",
    "named", "own_words", "plan_to_run", "policies", "policy_at", "policy_name", "reorders", "words_of_others",
]  # fmt: skip

ENTRY_POINTS = "pstar.policies"


ELSEWHERE = {
    "ddp": "all_on_gpu",
    "fsdp": "zero3_resident",
    "fsdp2": "zero3_resident",
    "zero1": "zero3_resident:reshard=off",
    "zero2": "zero3_resident:reshard=off",
    "zero3": "zero3_resident",
}
"""What users of PyTorch and DeepSpeed call a policy -> its spec, as the readers of their configurations choose it
(frameworks/). Stages 1 and 2 differ in the bytes of gradients, of which the policy keeps those of stage 2."""
STAGED = ("all_on_gpu", "zero3_resident", "tide")
"""Policies of a question about parallelism that names none: all on the GPUs, in slices, and what leaves the GPUs."""

_BUILT_IN: dict[str, Policy] = {**BEFORE_OPTIMAL, "optimal": optimal, **AFTER_OPTIMAL}


def built_in() -> dict[str, Policy]:
    return dict(_BUILT_IN)


def policies() -> dict[str, Policy]:
    """Name -> policy; an entry point cannot take over a built-in name.

    Raises PstarError, naming entry point and package, for one that cannot be loaded or is no function.
    """
    found = dict(_BUILT_IN)
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        if point.name not in found:
            found[point.name] = _load(point)
    return found


def is_built_in(policy: Policy) -> bool:
    """Shipped here, with or without options, or planning by such a one (`plans_by`, a spec)."""
    spec = getattr(policy, "plans_by", None)
    found = find_policy(spec) if isinstance(spec, str) else policy
    return (found.policy if isinstance(found, Specified) else found) in _BUILT_IN.values()


def can(policy: str | Policy) -> Capabilities:
    """Raises the errors of `find_policy`."""
    return capabilities_of(find_policy(policy) if isinstance(policy, str) else policy)


def plan_to_run(policy: str | Policy, workload: Workload, machine: Machine, settings: Settings) -> Plan:
    """With its workspace. Raises the errors of `find_policy`, and the policy's."""
    function = find_policy(policy) if isinstance(policy, str) else policy
    return planned_beside_workspace(lambda where: function(workload, where, settings), workload, machine)


def sharded_as(policy: str | Policy, shard: str | None) -> str | Policy:
    """The policy as ranks that share a batch slice `shard` (one of SHARDS), None: itself. Raises CannotPlan if it never
    does so."""
    if shard is None:
        return policy
    name, options = split_spec(policy if isinstance(policy, str) else policy.__name__)
    able = can(name if isinstance(policy, str) else policy).shards
    if shard not in able:
        ways = " or ".join(f"shard={word}" for word in able)
        raise CannotPlan(f"{name} slices {f'as {ways}' if able else 'in its own way'}; leave shard={shard} out")
    if not able[shard] or able[shard] in options.split(","):
        return policy
    spec = f"{options},{able[shard]}" if options else able[shard]
    return f"{name}:{spec}" if isinstance(policy, str) else specified(name, policy, able[shard])


def reorders(policy: str | Policy) -> bool:
    """Whether plans are layer-major, by itself or its option `order`. Raises as `find_policy`."""
    found = find_policy(policy) if isinstance(policy, str) else policy
    if isinstance(found, Specified):
        return reorders(found.policy) or found.values.get("order", Point().order) != Point().order
    return can(found).reorders


def can_follow(settings: Settings, workload: Workload, policy: str | Policy) -> bool:
    """Whether the settings' loop can follow its plans ([Note: which order] in optimal.py). Raises as `find_policy`."""
    return settings.loop == "step" or keeps_order(workload.micro_batches, workload.order, policy)


def keeps_order(micro_batches: int, order: Order, policy: str | Policy) -> bool:
    """Whether its plans run in the job's order."""
    return micro_batches == 1 or not order.of_loop or not reorders(policy)


def named(wanted: Callable[[Capabilities], bool]) -> tuple[str, ...]:
    """Shipped policies with the wanted capabilities, in registry order."""
    return tuple(name for name, policy in _BUILT_IN.items() if wanted(capabilities_of(policy)))


def policy_at(point: Point) -> str:
    """The policy without options."""
    (name,) = named(lambda able: able.point == point)
    return name


def find_policy(spec: str) -> Policy:
    """Loads entry points only for a name that is not built in. Raises UnknownName with the nearest names, PstarError
    for options that the policy lacks, and as `policies`."""
    name, options = split_spec(spec)
    policy = _BUILT_IN.get(name)
    if policy is None:
        known = policies()
        if name not in known:
            raise UnknownName("policy", name, tuple(known))
        policy = known[name]
    if not options and ":" not in spec:
        return policy
    return specified(name, policy, options)


def own_words(spec: str) -> str:
    """For another spelling of a name and those of ELSEWHERE, as `find_policy` takes it."""
    name, options = split_spec(spec)
    if name in _BUILT_IN:
        return spec
    word = letters(name)
    own = ELSEWHERE.get(word) or next((known for known in _BUILT_IN if letters(known) == word), None)
    if own is None:
        return spec
    return own if not options else f"{own}{',' if ':' in own else ':'}{options}"


def words_of_others(names: Iterable[str]) -> tuple[str, ...]:
    """A note where ELSEWHERE changed the name."""
    if not any(split_spec(name)[0] == "zero3_resident" for name in names):
        return ()
    return ("zero3_resident is FSDP, or ZeRO-3 without offloading (reshard=off: ZeRO-2); see `pstar policies`",)


def policy_name(spec: str | Policy) -> str:
    """The normalised spec, or the function's name. Raises as `find_policy`."""
    if not isinstance(spec, str):
        return str(getattr(spec, "__name__", type(spec).__name__))
    policy = find_policy(spec)
    return policy.__name__ if isinstance(policy, Specified) else split_spec(spec)[0]


def _load(point: EntryPoint) -> Policy:
    package = "" if point.dist is None else f" of package {point.dist.name!r}"
    what = f"policy {point.name!r}{package} (entry point {ENTRY_POINTS}: {point.value})"
    try:
        policy = point.load()
    except Exception as error:  # a foreign module may raise anything while it is imported
        raise PstarError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(policy):
        raise PstarError(
            f"{what} is not a function (workload, machine, settings) -> Plan but a {type(policy).__name__}"
        )
    loaded: Policy = policy
    return loaded
