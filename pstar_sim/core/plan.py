"""Plan: a program of steps with everything needed to check, simulate, explain and run it.

A plan is one iteration that repeats. [Note: the cut] The cut lies between two iterations, after every step of iteration
k has ended and before any step of k+1 begins. There the places hold exactly `initial`, and every @-1 reference is
satisfied. Steps of successive iterations overlap in time, but on each queue in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from pstar_sim.arguments import choice, file_path, flag, number, size_bytes
from pstar_sim.catalog.machine import Machine
from pstar_sim.collector import without_garbage_collection
from pstar_sim.core.check_report import CheckReport
from pstar_sim.core.layout import Layout
from pstar_sim.core.step import ROUTES, Place, Step, from_text, to_text
from pstar_sim.dtypes import DTYPES
from pstar_sim.errors import PlanError
from pstar_sim.renderers import render, render_html
from pstar_sim.units import format_bytes, format_ranks, format_s
from pstar_sim.workload.workload import Workload, activations_text

__all__ = [
    "LOOPS",
    "MODES",
    "STASHES",
    "SUMS",
    "Plan",
    "Resident",
    "Settings",
    "load_plan",
    "moved_bytes",
    "steps_from_text",
    "steps_to_text",
]

STASHES = "stashes"
"""Name of the buffer on the host that holds the workload's stashes."""
MODES = ("cpu", "pin", "stream", "frozen")
LOOPS = ("own", "step")
"""The code that runs an iteration: a training loop of the user, micro-batch by micro-batch, or `session.step`, which
can also run a layer-major plan."""
SUMS = ("32-bit", "16-bit")
"""Number of bits in which the gradients of several micro-batches add up: exactly in fp32, or in the dtype of a bf16
model, as plain PyTorch does in `.grad`."""


ANY_PLAN = 1e-9
"""Effort with which a policy that searches makes the first plan that has room, for a question about room alone."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that the caller gives to every policy.

    update: "step" (no Adam before optimizer.step()) or "eager" (inside backward).
    clip: whether gradients are clipped by their global norm.
    chunk_bytes: bytes of the working list of one chunk; None searches for the best. A size such as "128MiB" is
        converted to bytes.
    loop: the code that runs the iterations, one of LOOPS. With "step" a policy that searches also chooses the order of
        the iteration.
    sums: number of bits in which gradients of several micro-batches add up, one of SUMS. "16-bit", not for fp32
        models, takes half of the room and rounds every addition.
    effort: effort of a policy that searches, as a multiple of the usual effort. More effort mostly, not always, finds
        a faster plan.

    Raises PlanError for other values. Settings of a single policy are options in the policy's name.
    """

    update: str = "step"
    clip: bool = True
    chunk_bytes: int | None = None
    loop: str = "own"
    sums: str = "32-bit"
    effort: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.update, str) or self.update not in ("step", "eager"):
            raise PlanError(f'update must be "step" or "eager", not {self.update!r}')
        flag("clip", self.clip, error=PlanError)
        choice("loop", self.loop, LOOPS, error=PlanError)
        choice("sums", self.sums, SUMS, error=PlanError)
        object.__setattr__(self, "effort", number("effort", self.effort, error=PlanError))
        if self.chunk_bytes is not None:
            object.__setattr__(self, "chunk_bytes", size_bytes("chunk_bytes", self.chunk_bytes, error=PlanError))

    @property
    def any_will_do(self) -> bool:
        return self.effort <= ANY_PLAN

    def barrier(self, dtype: str) -> str | None:
        """Why no Adam may run before all gradients are there ("clip", "loss scaling", "update=step")."""
        if self.clip:
            return "clip"
        if DTYPES[dtype].scaled:
            return "loss scaling"
        return "update=step" if self.update == "step" else None


class Resident(Struct, frozen=True, order=True):
    """One list of one chunk at one place, or a buffer: chunk -1, `list` its name, its bytes in Plan.buffers."""

    chunk: int
    list: str
    place: Place


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """One iteration, as every rank runs it.

    workload: the job of each rank. If ranks have different jobs, one that is at least as hard as each of these.
    modes: per chunk "cpu", "pin", "stream" or "frozen".
    initial: residents at the cut.
    steps: those of each queue in the order in which they run.
    gpu_budget_bytes, host_budget_bytes: what one rank may take.
    nvme_budget_bytes: 0 for disks that the plan does not use.
    buffers: (name, place, bytes) that the policy holds throughout, including the room for stashes (STASHES).
    predictions: figures by name (iteration_s, peak_gpu_bytes, lower_bound_s ...).
    choices: the policy's decisions and their reasons, for `explain` (capacity rule, pins tried, kept gaps ...).
    ranked: each rank's own job, if these differ. They are of one model and run the same moments.

    Raises PlanError for `ranked` that are not one per rank, with the moments and uses of `workload`.
    """

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
    nvme_budget_bytes: int = 0
    buffers: tuple[tuple[str, Place, int], ...] = ()
    predictions: Mapping[str, float] = field(default_factory=dict)
    choices: Mapping[str, object] = field(default_factory=dict)
    ranked: tuple[Workload, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranked is not None:
            _check_ranked(self.ranked, self.workload, self.machine)

    def __repr__(self) -> str:
        return f"<Plan {self.policy}: {self.workload.model} on {self.machine.name}, {len(self.steps)} steps>"

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def jobs(self) -> tuple[Workload, ...]:
        return self.ranked or (self.workload,) * self.machine.world_size

    @property
    def tokens(self) -> int:
        """Of all ranks, per iteration."""
        return sum(job.tokens for job in self.jobs)

    @property
    def own_batches(self) -> str | None:
        """Such as "8 on rank 0, 4 on ranks 1, 2"; None if all ranks have one job."""
        if self.ranked is None:
            return None
        ranks_of: dict[int, list[int]] = {}
        for rank, job in enumerate(self.ranked):
            ranks_of.setdefault(job.batch, []).append(rank)
        return ", ".join(f"{batch} on {format_ranks(ranks)}" for batch, ranks in ranks_of.items())

    @property
    def gpu_budgets(self) -> tuple[int, ...]:
        """`gpu_budget_bytes` is that of the smallest GPU; a larger GPU has so many bytes more."""
        smallest = self.machine.gpu_budget_bytes
        return tuple(self.gpu_budget_bytes + rank.gpu.budget_bytes - smallest for rank in self.machine.ranks)

    @property
    def budgets(self) -> dict[Place, int]:
        """Bytes that the plan may take on one rank, of the places that it uses."""
        budgets = {Place.GPU: self.gpu_budget_bytes, Place.HOST: self.host_budget_bytes}
        return {**budgets, Place.NVME: self.nvme_budget_bytes} if self.nvme_budget_bytes else budgets

    @cached_property
    def moved_bytes(self) -> dict[str, int]:
        """Bytes that one rank moves per iteration: {"h2d": ..., "d2h": ...}. Plans with such steps also have "net"
        (bytes sent, and as many received, in collectives), "nvme_read" and "nvme_write"."""
        return moved_bytes(self.steps, self.machine.data_parallel_size)

    def check(self, workload: Workload | None = None, machine: Machine | None = None) -> CheckReport:
        """Prove the plan, and compare its budgets with its machine and its figures of bytes with the proof
        (core/checker). With `workload` or `machine`, also check that the plan is for it. The report also names
        everything that is not checked.

        Raises PlanError with the first violation.
        """
        report: CheckReport = render(self, "proof", workload=workload, machine=machine)
        return report

    def save(self, path: str | Path) -> None:
        """Write a self-contained JSON file, atomically. Raises PlanError if a value has no JSON form."""
        from pstar_sim.core.plan_file import save_plan

        save_plan(self, Path(path))

    def to_text(self) -> str:
        """`steps_from_text` is the exact reverse."""
        return steps_to_text(self.steps)

    def describe(self) -> str:
        w = self.workload
        modes = Counter(self.modes)
        kinds = Counter(step.kind.value for step in self.steps)
        barrier = self.settings.barrier(w.compute_dtype)
        clip = "clipping" if self.settings.clip else "no clipping"
        adam = f"after the barrier ({barrier})" if barrier else "as gradients arrive"
        moved = self.moved_bytes
        on = "on" if w.checkpointing else "off"
        shape = f"batch {self.own_batches or w.batch} x {w.micro_batches}, sequence {w.sequence}, checkpointing {on}"
        what = ", ".join(f"{modes[mode]} {mode}" for mode in MODES if modes[mode])
        size, waste = format_bytes(self.layout.chunk_bytes), f"{self.layout.waste:.2%} waste"
        gpu, host = format_bytes(self.gpu_budget_bytes), format_bytes(self.host_budget_bytes)
        lines = [
            f"{self.policy}: {w.model}, {w.dtype}, {shape}, on {self.machine.name}",
            f"update {self.settings.update}, {clip}: Adam runs {adam}",
            f"budgets: gpu {gpu}, host {host}; tide peak {format_bytes(w.peak_non_model_bytes)}",
            f"{len(self.modes)} chunks of {size} ({waste}): {what}",
            f"{len(self.steps)} steps: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
            f"moves {format_bytes(moved['h2d'])} to the gpu and {format_bytes(moved['d2h'])} to the host per iteration",
        ]
        if w.activations:
            lines.append(f"activations: {activations_text(w)}")
        if self.machine.data_parallel_size > 1:
            lines.append(
                f"on each of {self.machine.world_size} ranks, which all run these steps; each sends "
                f"{format_bytes(moved.get('net', 0))} to the others per iteration"
            )
        if "iteration_s" in self.predictions:
            lines.append(f"predicted iteration: {format_s(self.predictions['iteration_s'])}")
        return "\n".join(lines)


def _check_ranked(ranked: Sequence[Workload], workload: Workload, machine: Machine) -> None:
    if len(ranked) != machine.world_size:
        raise PlanError(f"{len(ranked)} workloads for {machine.world_size} ranks; each rank needs its own")

    def of_job(w: Workload) -> tuple[object, ...]:
        return w.fingerprint, w.dtype, w.autocast, w.optimizer, w.uses, len(w.moments), w.stashes

    same: set[int] = set()
    for r, job in enumerate(ranked):
        if id(job) not in same and of_job(job) != of_job(workload):
            raise PlanError(f"the workload of rank {r} has other parameters, moments or uses than the plan's")
        same.add(id(job))


def moved_bytes(steps: Iterable[Step], ranks: int) -> dict[str, int]:
    """Of one rank, by route, as `Plan.moved_bytes`."""
    moved = {"h2d": 0, "d2h": 0}
    for step in steps:
        route = ROUTES.get(step.kind)
        if route is not None:
            # In a collective a rank sends every slice but its own, whichever ring or tree they go along.
            moved[route] = moved.get(route, 0) + (step.bytes * (ranks - 1) // ranks if route == "net" else step.bytes)
    return moved


def steps_to_text(steps: Iterable[Step]) -> str:
    return "".join(to_text(step) + "\n" for step in steps)


def steps_from_text(text: str) -> tuple[Step, ...]:
    """Reverses `steps_to_text`, without empty lines and those that begin with "#".

    Raises PlanError naming the line number and the wrong word.
    """
    steps: list[Step] = []
    for at, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            steps.append(from_text(line))
        except PlanError as error:
            raise PlanError(f"line {at}: {error}") from None
    return tuple(steps)


@without_garbage_collection()
def load_plan(path: str | Path) -> Plan:
    """Returns the plan in a file; does not run the checker. Raises PlanError naming the file and the field or line."""
    from pstar_sim.core.plan_file import read_plan

    return read_plan(file_path("path", path, error=PlanError))
