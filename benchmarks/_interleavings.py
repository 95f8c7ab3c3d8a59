"""Interleavings: the same plan under every timing gives the same bits.

Half of the runs have one thread per queue. Each step of every queue (compute too) is delayed at random before it takes
memory, before it works and before it ends. The other half have no threads, and the next event is drawn among all that
the plan's edges allow, which reaches orders that no timing of this machine would. Every loss, every parameter and every
optimizer state is compared, bit by bit, with one run in which each queue goes as far as it may before compute
continues.
"""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from executor import AdamW, SerialQueues, ThreadQueues, prepare
from executor.capture import capture_module
from executor.queues.interface import Progress, Work
from pstar_sim.catalog.loader import load_machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place, Queue
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import repeat_micro_batch

__all__ = ["DelayedQueues", "Report", "drawn_queues", "job_of", "run_interleavings"]

STEPS = 3
MICRO_BATCHES = 2
POLICIES = ("tide", "zero_offload", "patrickstar")
LONGEST_S = 1e-3


class Net(nn.Module):
    """Layers of different widths; the loss is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 64, 48, 80, 32, 64, 24)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(torch.relu(x))
        loss: torch.Tensor = ((x - y) ** 2).mean()
        return loss


class DelayedQueues(ThreadQueues):
    """Threads whose steps, and the compute queue's, wait at random.

    share: share of the points at which a thread waits.
    """

    def __init__(self, seed: int, *, longest_s: float = LONGEST_S, share: float = 0.3) -> None:
        super().__init__(watchdog_s=30.0)
        self._rng = random.Random(seed)
        self._longest_s = longest_s
        self._share = share

    def delay(self) -> None:
        if self._rng.random() < self._share:
            time.sleep(self._rng.random() * self._longest_s)

    def start(self, progress: Progress, work: Work) -> None:
        self._delayed = _DelayedWork(work, self.delay)  # queues hold their work weakly
        super().start(progress, self._delayed)

    def wait(self, i: int, iteration: int) -> int | None:
        self.delay()
        return super().wait(i, iteration)

    def end_step(self, i: int, iteration: int) -> None:
        self.delay()
        super().end_step(i, iteration)


class _DelayedWork:
    def __init__(self, work: Work, delay: Callable[[], None]) -> None:
        self._work = work
        self._delay = delay

    def begin(self, i: int, iteration: int, ready_s: float, waited_for: int | None) -> None:
        self._delay()
        self._work.begin(i, iteration, ready_s, waited_for)

    def work(self, i: int, iteration: int) -> None:
        self._delay()
        self._work.work(i, iteration)

    def finish(self, i: int, iteration: int) -> None:
        self._delay()
        self._work.finish(i, iteration)

    def note_landing(self, chunk: int) -> None:
        self._work.note_landing(chunk)

    def enter_thread(self, queue: Queue) -> None:
        self._work.enter_thread(queue)


def drawn_queues(seed: int) -> SerialQueues:
    """Returns queues in which each possible event, or letting compute continue, is equally likely. Half of the steps
    work when they start."""
    rng = random.Random(seed)

    def choose(possible: Sequence[Any], compute: Any, may: bool) -> int | None:
        pick = rng.randrange(len(possible) + 1)
        return None if pick == len(possible) else pick

    return SerialQueues(choose, works_early=lambda step: rng.random() < 0.5)


def eager_queues() -> SerialQueues:
    """Returns the queues of the serial run: each queue goes as far as it may, the first one first."""
    return SerialQueues(lambda possible, compute, may: 0)


def job_of(policy: str, *, on_disks: bool = False) -> tuple[nn.Module, Plan]:
    """Returns a net and a plan for it that has to move chunks.

    on_disks: for a host that has room for a part of the states.
    """
    torch.manual_seed(0)
    model = Net()
    batch = {"x": torch.randn(2, 24), "y": torch.randn(2, 24)}
    w = repeat_micro_batch(capture_module(model, batch, name="net", batch=2, sequence=1), MICRO_BATCHES)
    params = sum(t.bytes for t in w.tensors)
    share = {"tide": 0.8, "optimal": 0.8, "patrickstar": 2.0}.get(policy, 3.0)
    disks = [tempfile.gettempdir()] if on_disks else []  # for their room alone
    machine = load_machine("virtual", gpu_memory=w.peak_non_model_bytes + int(share * params), disks=disks)
    if on_disks:
        host_bytes = machine.host.reserved_bytes + params * (6 if policy.startswith("zero_infinity") else 4)
        machine = replace(machine, host=replace(machine.host, memory_bytes=host_bytes))
    plan = find_policy(policy)(w, machine, Settings(clip=True))
    plan.check()
    assert on_disks == any(row.place is Place.NVME for row in plan.initial)
    return model, plan


def outcome(model: nn.Module, plan: Plan, queues: Any) -> dict[str, torch.Tensor]:
    """Returns losses, parameters and states after a few steps."""
    spec = AdamW(lr=1e-2, max_grad_norm=0.5)
    model, optimizer = prepare(copy.deepcopy(model), plan, spec, queues=queues, check=False)
    try:
        draw = torch.Generator().manual_seed(1)
        found: dict[str, torch.Tensor] = {}
        for _ in range(STEPS):
            for _ in range(MICRO_BATCHES):
                loss = model(torch.randn(2, 24, generator=draw), torch.randn(2, 24, generator=draw)) / MICRO_BATCHES
                loss.backward()
                found[f"loss {len(found)}"] = loss.detach().clone()
            optimizer.step()
            optimizer.zero_grad()
        found |= {f"parameter {name}": value for name, value in model.state_dict().items()}
        for number, row in optimizer.state_dict()["state"].items():
            found |= {f"{key} {number}": row[key] for key in ("exp_avg", "exp_avg_sq")}
        assert optimizer.session.deviations == 0
        return found
    finally:
        optimizer.session.close(restore=False)


@dataclass
class Report:
    """Results of interleavings.

    runs: number of runs of each policy.
    misses: differences, and errors.
    """

    runs: dict[str, int] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    seconds: float = 0.0


def run_interleavings(
    count: int,
    *,
    policies: Sequence[str] = POLICIES,
    first_seed: int = 0,
    kinds: Sequence[Callable[[int], Any]] = (DelayedQueues, drawn_queues),
    on_miss: Callable[[str], None] = lambda miss: None,
) -> Report:
    """Run `count` interleavings of each policy's plan, the kinds in turn."""
    report = Report()
    begun_s = time.perf_counter()
    for policy in policies:
        model, plan = job_of(policy)
        expected = outcome(model, plan, eager_queues())
        for seed in range(first_seed, first_seed + count):
            try:
                found = outcome(model, plan, kinds[seed % len(kinds)](seed))
            except Exception as error:
                differ = [f"{type(error).__name__}: {error}"]
            else:
                differ = [name for name in expected if not torch.equal(found[name], expected[name])]
            report.runs[policy] = report.runs.get(policy, 0) + 1
            if differ:
                report.misses.append(f"{policy} {seed}: {', '.join(differ[:3])}")
                on_miss(report.misses[-1])
    report.seconds = time.perf_counter() - begun_s
    return report
