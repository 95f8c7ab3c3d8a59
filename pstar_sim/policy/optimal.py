"""optimal: the plan of a search, or of another policy where that is faster.

All are followed. The plan is at most 0.01 % slower than that of any shipped policy without options, or as ranks slice
otherwise. With other options a policy may be faster (benchmarks/options.py). If GPUs differ, the planner chooses shares
of the batch together with the plan (planner/balance.py).

[Note: which order] A loop of the user runs micro-batches in the workload's order. For `session.step`
(`Settings.loop`), layer-major order is searched too, with boundary activations on the GPU and on the host; layer-major
policies are then rivals, unless an order is given.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.plan_set import slices_as
from pstar_sim.errors import CannotPlan, DoesNotFit, PstarError
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.family.searched import LONG_LOOK, SearchResult, own_plans
from pstar_sim.policy.kit.capabilities import Capabilities, capabilities_of
from pstar_sim.policy.kit.iteration_order import ORDERS, in_order, order_of
from pstar_sim.policy.kit.options import Option, one_of, specified
from pstar_sim.policy.kit.points import Coordinates, Point, point_options
from pstar_sim.policy.kit.sharing import known_s, plan_once, remember_least_s
from pstar_sim.policy.kit.ties import burden, least_of
from pstar_sim.policy.shipped import AFTER_OPTIMAL, BEFORE_OPTIMAL, Policy
from pstar_sim.units import format_s
from pstar_sim.workload.workload import Workload

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["CAPABILITIES", "OPTIONS", "optimal"]

POINT = Point(streams=True, sums=True)
FASTEST = "fastest"  # value of the option `order`: each order that the loop can follow is searched
_ORDER = point_options(POINT)["order"]
OPTIONS = {
    **point_options(POINT),
    "order": Option(
        one_of(FASTEST, *ORDERS), f"{_ORDER.help}, or the fastest of these that the loop can follow", FASTEST
    ),
    "shard": Option(
        one_of(FASTEST, "parameters"), "what ranks that share a batch slice: the fastest, or parameters", FASTEST
    ),
    "shares": Option(
        one_of(FASTEST, "machine"), "shares of the batch if GPUs differ: the fastest, or the machine's", FASTEST
    ),
}
CAPABILITIES = Capabilities(
    point=POINT, searches=True, tries_others=True, fastest_shares=True, shards={"parameters": "shard=parameters"}
)
_WORDS = dict(
    zip(ORDERS, ("micro-batch by micro-batch", "layer by layer", "layer by layer with the boundaries on the host"))
)


@without_garbage_collection()
def optimal(
    workload: Workload,
    machine: Machine,
    settings: Settings,
    *,
    shard: str = FASTEST,
    shares: str = FASTEST,
    **changes: Unpack[Coordinates],
) -> Plan:
    """Returns the fastest plan that this project can make.

    shard: "parameters": no plans that slice otherwise.
    shares: chosen by planner/balance.py.
    changes: coordinates of another point, without plans of other policies. `order` may also be "fastest".

    Raises DoesNotFit, with the needs of optimal's own modes, if no policy fits.
    """
    if changes.get("order") == FASTEST:
        del changes["order"]
    point = replace(POINT, **changes)
    orders = [point.order] if "order" in changes else _orders(workload, machine, settings)
    reason: DoesNotFit | None = None
    found: list[SearchResult] = []
    for order in orders:
        try:
            found += own_plans(workload, machine, settings, replace(point, order=order), "optimal", sizes=True)
        except DoesNotFit as short:
            reason = reason or short
    if not changes and not settings.any_will_do:
        found += _behind_barrier(workload, machine, settings, found)
        found += _others(workload, machine, settings, found, orders)
    if not changes and not found and machine.nvme is not None:
        found += _from_disks(workload, machine, settings)
    found = [one for one in found if slices_as(one.plan, None if shard == FASTEST else shard)]
    if not found:
        assert reason is not None
        raise reason
    best = least_of(
        found, seconds=lambda f: f.seconds, burden=lambda f: (not f.plan.workload.order.of_loop, *burden(f.plan))
    )
    choices = dict(best.plan.choices)
    rivals = {f.of: format_s(f.seconds) for f in found if f.of != "optimal"}
    if best.of != "optimal":
        choices["schedule"] = _schedule_words(best, found, reason)
    elif rivals:
        choices["others"] = rivals
    if len(orders) > 1:
        choices["order"] = _order_words(found, best, orders)
    predictions = dict(best.plan.predictions) | {"policy_iteration_s": best.seconds}
    return replace(best.plan, policy="optimal", choices=choices, predictions=predictions)


def _schedule_words(best: SearchResult, found: Sequence[SearchResult], reason: DoesNotFit | None) -> str:
    own_s = min((f.seconds for f in found if f.of == "optimal"), default=None)
    if own_s is None:
        why = f"no plan of optimal's own fits ({reason})"
    elif best.seconds < own_s:
        why = f"faster than optimal's own best plan, {format_s(own_s)}"
    else:
        why = f"as fast as optimal's own best plan, {format_s(own_s)}, and moves less"
    return f"that of {best.of}: {why}"


def _orders(workload: Workload, machine: Machine, settings: Settings) -> list[str]:
    own, *others = ORDERS
    if settings.loop == "own" or workload.micro_batches == 1 or machine.data_parallel_size > 1 or workload.relayed:
        return [own]
    orders = [own]
    for order in others:
        with contextlib.suppress(CannotPlan):
            in_order("optimal", workload, order)
            orders.append(order)
    return orders


def _order_words(found: Sequence[SearchResult], best: SearchResult, orders: Sequence[str]) -> str:
    mine = order_of(best.plan.workload)
    least_s = dict.fromkeys((mine, *orders), math.inf)
    for f in found:
        order = order_of(f.plan.workload)
        least_s[order] = min(least_s[order], f.seconds)
    said = {order: "does not fit" if s == math.inf else format_s(s) for order, s in least_s.items()}
    return "; ".join(f"{_WORDS[order]}: {seconds}" for order, seconds in said.items())


def _behind_barrier(
    workload: Workload, machine: Machine, settings: Settings, own: Sequence[SearchResult]
) -> Iterator[SearchResult]:
    """Where none is asked for, with a look's effort: it may make room for sums."""
    asked = settings.barrier(workload.compute_dtype) is not None
    left = max((f.left for f in own), default=0.0)
    if asked or workload.micro_batches == 1 or machine.data_parallel_size > 1 or not left:
        return
    less = replace(settings, effort=min(left, LONG_LOOK) * settings.effort)
    with contextlib.suppress(DoesNotFit):
        for one in own_plans(workload, machine, less, replace(POINT, barrier=True), "optimal", sizes=True):
            choices = {
                **one.plan.choices,
                "barrier": "the plan's own: no Adam before the last gradient leaves more room",
            }
            plan = replace(one.plan, settings=settings, choices=choices)
            yield SearchResult(one.seconds, one.of, plan)  # its closed forms are no others'


def _others(
    workload: Workload, machine: Machine, settings: Settings, own: Sequence[SearchResult], orders: Sequence[str]
) -> Iterator[SearchResult]:
    """Without layer-major policies unless searched, and those whose closed form a found plan beats."""
    best_s = min((f.seconds for f in own), default=math.inf)
    for name, policy in _rivals(sliced=machine.data_parallel_size > 1).items():
        able = capabilities_of(policy)
        if _in_another_order(able, workload, orders):
            continue
        reordered = able.reorders or not workload.order.of_loop
        alike = [f for f in own if reordered is not f.plan.workload.order.of_loop]
        if best_s < max((_closed_s(able, f, machine) for f in alike), default=0.0):
            surely_s = max(_closed_s(able, f, machine, surely=True) for f in alike)
            remember_least_s(policy, workload, machine, settings, surely_s)
            continue
        try:
            plan = plan_once(policy, workload, machine, settings)
        except PstarError:  # the policy does not fit, or does not apply to this machine
            continue
        seconds = known_s(plan)
        seconds = period_s(plan) if seconds is None else seconds
        remember_least_s(policy, workload, machine, settings, seconds)
        yield SearchResult(seconds, name, plan)


def leaves_out(policy: str, workload: Workload, machine: Machine, settings: Settings) -> bool:
    """Whether its order is not searched, or its plans on equal GPUs are another's."""
    able = capabilities_of({**BEFORE_OPTIMAL, **AFTER_OPTIMAL}.get(policy, optimal))
    if able.balance is not None and not machine.mixed:
        return True
    return _in_another_order(able, workload, _orders(workload, machine, settings))


def _in_another_order(able: Capabilities, workload: Workload, orders: Sequence[str]) -> bool:
    return able.reorders and workload.order.of_loop and len(orders) == 1


def _closed_s(able: Capabilities, own: SearchResult, machine: Machine, *, surely: bool = False) -> float:
    """0 if the policy streams or, on several GPUs, may slice or pin otherwise."""
    without_pins_s, with_any_s = (0.0, 0.0) if machine.mixed else own.rivals_s
    alone = machine.data_parallel_size == 1 and not able.streams_states
    return max(
        (with_any_s if surely else own.pins_alone_s) if alone or able.point is not None else 0.0,
        without_pins_s if able.cpu_updates else 0.0,
        with_any_s if able.near is not None else 0.0,
    )


def _from_disks(workload: Workload, machine: Machine, settings: Settings) -> Iterator[SearchResult]:
    least_bytes = max(t.bytes for t in workload.tensors) // machine.data_parallel_size  # one on its way
    if machine.gpu_budget_bytes < workload.peak_non_model_bytes or machine.host_budget_bytes < least_bytes:
        return
    for name, policy in _rivals().items():
        for options in capabilities_of(policy).from_disks:
            try:
                plan = specified(name, policy, options)(workload, machine, settings)
            except PstarError:
                continue
            yield SearchResult(period_s(plan), f"{name}:{options}", plan)


def _rivals(*, sliced: bool = False) -> dict[str, Policy]:
    """sliced: also in the other ways to slice over ranks, by spec."""
    found: dict[str, Policy] = {}
    for name, policy in {**BEFORE_OPTIMAL, **AFTER_OPTIMAL}.items():
        able = capabilities_of(policy)
        if able.balance is None:
            found[name] = policy
            ways = [*able.shards.values()][1:] if sliced else []
            found |= {f"{name}:{options}": specified(name, policy, options) for options in ways}
    return found
