"""Arguments of the planner's questions: policies by name, settings, and the callback for progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pstar_sim.arguments import function, instance, names, refused
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import PstarError
from pstar_sim.policy.kit.capabilities import capabilities_of
from pstar_sim.policy.registry import Policy
from pstar_sim.policy.registry import policies as all_policies

OnPart = Callable[[str, int, int], object]
"""Called with the next part of the work, the number of parts done and the number of parts."""


def settings_of(settings: Settings | None) -> Settings:
    if settings is None:
        return Settings()
    want = "ps.Settings(update=..., clip=..., chunk_bytes=..., loop=..., sums=..., effort=...)"
    return instance("settings", settings, Settings, want)


def asked_policies(policies: Iterable[str | Policy] | str | None, machine: Machine | None = None) -> list[str | Policy]:
    """All known policies if none is named. Raises PstarError for an empty list.

    machine: if its GPUs differ, policies that choose the ranks' shares of the batch are included.
    """
    if policies is None:
        differ = machine is not None and machine.mixed
        return [name for name, policy in all_policies().items() if differ or capabilities_of(policy).balance is None]
    found = names("policies", policies, "a list of policies, such as ['tide', 'optimal']")
    if not found:
        raise PstarError("policies = []: give at least one policy, or leave policies out for all of them")
    out: list[str | Policy] = []
    for policy in found:
        if not isinstance(policy, str) and not callable(policy):
            want = "names of policies or functions (workload, machine, settings) -> Plan"
            raise refused("policies", policies, want)
        out.append(policy)
    return out


def asked_names(policies: Iterable[str] | str | None) -> list[str]:
    found = asked_policies(policies)
    if not all(isinstance(policy, str) for policy in found):
        raise refused("policies", policies, "names of policies")
    return [str(policy) for policy in found]


def teller(on_part: OnPart | None) -> OnPart:
    """Does nothing if the caller gave none. Raises PstarError for what is not a function."""
    if on_part is None:
        return lambda part, done, parts: None
    function("on_part", on_part)
    return on_part
