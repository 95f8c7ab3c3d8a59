"""Plan: a program of steps with everything needed to check, simulate, explain and run it; and its file.

A plan is cyclic: one iteration that repeats. [Note: the cut] Between two iterations, once every step of iteration k has
ended and none of k+1 has begun, the places hold exactly `initial`; every @-1 reference is then satisfied. Steps of
successive iterations overlap in time; on each queue, all steps of iteration k come before those of k+1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import Layout
from pstar_sim.core.step import Place, Step
from pstar_sim.workload.workload import Workload

__all__ = ["Plan", "Resident", "Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the caller asked of every policy.

    update: "step" (no Adam before optimizer.step()) or "eager" (inside backward). clip: gradients are clipped by their
    global norm. chunk_bytes: payload of one working-list chunk, None = searched. prefetch etc. belong to policies, not here.
    """

    update: str = "step"
    clip: bool = True
    chunk_bytes: int | None = None

    def barrier(self, dtype: str) -> str | None:
        """Why no Adam may run before all gradients are there ("clip", "loss scaling", "update=step"), or None."""
        if self.clip:
            return "clip"
        if dtype == "fp16":
            return "loss scaling"
        return "update=step" if self.update == "step" else None


@dataclass(frozen=True, slots=True, order=True)
class Resident:
    """One list of one chunk at one place. chunk is -1 for a buffer of the policy's own (its bytes are in Plan.buffers)."""

    chunk: int
    list: str
    place: Place


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """modes: per chunk "cpu", "pin", "stream" or "frozen". initial: residents at the cut. buffers: (name, place, bytes)
    the policy holds throughout. predictions: figures by name (iteration_s, peak_gpu_bytes, lower_bound_s ...), may be empty.
    choices: what the policy decided and why, for `explain` (capacity rule, pins tried, kept gaps ...)."""

    policy: str
    workload: Workload
    machine: Machine
    settings: Settings
    layout: Layout
    modes: tuple[str, ...]
    initial: frozenset[Resident]
    steps: tuple[Step, ...]
    gpu_budget_bytes: int
    host_budget_bytes: int
    buffers: tuple[tuple[str, Place, int], ...] = ()
    predictions: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, object] = field(default_factory=dict)
