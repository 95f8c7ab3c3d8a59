"""Order: in which the plans of a policy run an iteration. relay.py makes the layer-major order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pstar_sim.errors import CannotPlan, TraceError
from pstar_sim.workload.relay import boundaries_on_host, relay
from pstar_sim.workload.workload import Workload

ORDERS = ("depth-first", "relay", "relay-host")
"""Micro-batch by micro-batch; block by block; block by block with the boundary stash on the host."""


ON_HOST = "depth-first-host"
"""Micro-batch by micro-batch, with the boundary stash on the host. Only policies that stand for another system plan
in this order: session.step runs it for one micro-batch."""

_MAKERS: Mapping[str, Callable[[Workload], Workload]] = {
    "relay": relay,
    "relay-host": partial(relay, stash="host"),
    ON_HOST: boundaries_on_host,
}


def order_of(workload: Workload) -> str:
    own, relayed, on_host = ORDERS
    return on_host if workload.boundaries_on_host else own if workload.order.of_loop else relayed


def in_order(name: str, workload: Workload, order: str) -> Workload:
    """A relayed workload stays; equal calls return the same object. Raises CannotPlan without a layer-major order."""
    if order == "depth-first" or workload.relayed:
        return workload
    key = ("order", order)
    known = workload.derived.get(key)
    if isinstance(known, Workload):
        return known
    try:
        made = _MAKERS[order](workload)
    except TraceError as reason:
        raise CannotPlan(f"{name}: {reason}") from reason
    if made.moments == workload.moments:
        made = workload
    workload.derived[key] = made
    return made
