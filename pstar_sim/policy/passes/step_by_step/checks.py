"""Checks that the GPU has room for bytes beside the tide."""

from __future__ import annotations

from pstar_sim.core.step import Place
from pstar_sim.policy.kit.room import describe_moment, worst_moment
from pstar_sim.policy.passes.builder import Builder


def check_beside_tide(b: Builder, held_bytes: int, what: str) -> None:
    """Raise DoesNotFit if they leave no room for the highest tide."""
    tide = b.uses.tide
    worst = worst_moment(tide)
    b.check_room(Place.GPU, held_bytes + tide[worst], f"{what} beside {describe_moment(b.workload, worst)}")
