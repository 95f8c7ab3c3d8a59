"""Nearest: what would make a policy fit that does not, found by trying.

Tried in this order, stopping at the first success of each kind: a catalog machine with more GPU memory, more host
memory, smaller micro-batches at the same global batch, checkpointing; then the other policies that are known to fit.
Nothing is suggested that was not planned by the policy itself. Knows the catalog and the presets; a workload that
comes from a trace is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pstar_sim.catalog.loader import load_machine, machine_names, resize
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.models import ModelEntry
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy.registry import Policy
from pstar_sim.units import GB
from pstar_sim.workload.presets import variant
from pstar_sim.workload.workload import Workload

__all__ = ["Ask", "nearest"]

Ask = Callable[[Workload, Machine, Settings], DoesNotFit | None]
"""Why a job does not fit; None if it does."""


def nearest(
    policy: Policy,
    workload: Workload,
    machine: Machine,
    settings: Settings,
    error: DoesNotFit,
    *,
    fitting: Sequence[str] = (),
    ask: Ask | None = None,
    shape: ModelEntry | None = None,
) -> str:
    """What would do, in words ("fits on a100-80, or with --batch 4 --micro-batches 2"); "" if nothing tried does.

    fitting: policies known to fit this very job, best first. ask: what says whether a job fits (None) or why not, by
    default the policy's own planning. shape: of a preset that is not in the catalog.
    """
    ask = ask or _planned(policy)
    found: list[str] = []
    if error.place == "host":
        more = _host_memory(ask, workload, machine, settings, error)
        if more:
            found.append(more)
    else:
        other = _gpu_memory(ask, workload, machine, settings, error)
        other = other or next(_machines(ask, workload, machine, settings, error), None)
        if other:
            found.append(other)
        # No batch is small enough where the model data alone are too large.
        possible = error.needed_bytes - workload.peak_non_model_bytes <= error.available_bytes
        smaller = next(_workloads(ask, workload, machine, settings, error, shape), None) if possible else None
        if smaller:
            found.append(smaller)
    if fitting:
        found.append(f"with --policy {fitting[0]}")
    return f"fits {', or '.join(found)}" if found else "nothing tried would make it fit"


def _planned(policy: Policy) -> Ask:
    def ask(workload: Workload, machine: Machine, settings: Settings) -> DoesNotFit | None:
        try:
            policy(workload, machine, settings)
        except DoesNotFit as error:
            return error
        return None

    return ask


def _machines(ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit) -> Iterator[str]:
    """Catalog machines with as many GPUs, each with room enough, smallest GPU first; with more host memory where that
    is short.
    """
    known: list[Machine] = []
    for name in machine_names():
        try:
            one = load_machine(name)
        except PstarError:  # "here" may know no GPU, "virtual" no size: neither can be recommended
            continue
        if (
            len(one.ranks) == len(machine.ranks)
            and one.gpu_budget_bytes >= error.needed_bytes
            and one.name != machine.name
        ):
            known.append(one)
    for one in sorted(known, key=lambda m: (m.gpu_budget_bytes, -m.host_budget_bytes)):
        short = ask(workload, one, settings)
        if short is None:
            yield f"on {one.name}"
        elif short.place == "host":
            more = _host_memory(ask, workload, one, settings, short)
            if more:
                yield f"on {one.name} {more}"


def _gpu_memory(ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit) -> str | None:
    """The smallest multiple of a tenth of a GB that does, where GPU memory is a figure of the user's own: on
    "virtual".
    """
    if machine.name != "virtual":
        return None
    tenths = -(-(error.needed_bytes + machine.gpu.context_bytes) * 10 // GB)
    bigger = resize(machine, gpu_memory=tenths * GB // 10)
    return f"with --gpu-memory {tenths / 10:g}GB" if ask(workload, bigger, settings) is None else None


def _host_memory(ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit) -> str | None:
    """The smallest multiple of 16 GB that does."""
    short: DoesNotFit | None = error
    for _ in range(3):  # what was short first may not be all that is
        assert short is not None
        wanted = short.needed_bytes * machine.local_ranks + machine.host.reserved_bytes
        size = -(-wanted // (16 * GB)) * 16
        bigger = replace(machine, host=replace(machine.host, memory_bytes=size * GB))
        short = ask(workload, bigger, settings)
        if short is None:
            return f"with --host-memory {size}GB"
        if short.place != "host":
            return None
    return None


def _workloads(
    ask: Ask, workload: Workload, machine: Machine, settings: Settings, error: DoesNotFit, shape: ModelEntry | None
) -> Iterator[str]:
    if workload.source != "preset":
        return

    def promising(changed: Workload) -> bool:
        """The policy needs as much less as the tide is lower: worth planning."""
        lower = workload.peak_non_model_bytes - changed.peak_non_model_bytes
        return error.needed_bytes - lower <= error.available_bytes

    if not workload.checkpointing:
        changed = variant(workload, checkpointing=True, shape=shape)
        if promising(changed) and ask(changed, machine, settings) is None:
            yield "with --checkpointing"
    for batch in (workload.batch // n for n in range(2, min(workload.batch, 1024) + 1) if workload.batch % n == 0):
        if not promising(variant(workload, batch=batch, micro_batches=1, shape=shape)):
            continue
        micro_batches = workload.micro_batches * (workload.batch // batch)
        if ask(variant(workload, batch=batch, micro_batches=micro_batches, shape=shape), machine, settings) is None:
            yield f"with --batch {batch * len(machine.ranks)} --micro-batches {micro_batches}"
