"""The cost of a moment beside its products: its operators' bandwidth, and a constant.

[Note: seconds of a moment] seconds = constant + products by shape + other flops / rate + other bytes / bandwidth, as in
cost.py. Bytes are those that operators read and write, as a capture counts them, and the engine's for an arriving
gradient (copy and norm: three times its bytes). Products and attention are measured alone
(`executor/calibration/shapes.py`), bandwidth and constant fitted to recorded moments of a small model: caches and
allocator treat operators differently inside a training step.

The engine's part is the difference to plain torch on many layers too small to compute anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import nn
from torch.nn import functional

from executor.calibration.bench import Bench
from executor.calibration.measured_device import Device
from executor.descriptions import AdamW
from executor.prepare import prepare
from executor.recording.record import record
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.layout import build_layout
from pstar_sim.core.plan import Settings
from pstar_sim.cost import CostModel
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import Workload

_NO_TIME = 1e18  # bytes/s at which bytes take no time


@dataclass(frozen=True, slots=True)
class Sample:
    """flops_s: of products and other flops.
    size_bytes: moved by other operators.
    """

    flops_s: float
    size_bytes: float
    seconds: float


def fit(samples: Sequence[Sample]) -> tuple[float, float]:
    """(constant in s, at least 0, bandwidth in bytes/s) by least squares of relative errors.

    Raises ValueError where samples do not determine the bandwidth (under two, all of one size, or no time left for
    bytes).
    """
    # Weights are 1/seconds: minimise the sum of (constant a + slope b - 1 - rest c)**2, with a, b and c over seconds.
    rows = [(1 / s.seconds, s.size_bytes / s.seconds, 1 - s.flops_s / s.seconds) for s in samples]
    aa, ab, bb = sum(a * a for a, _, _ in rows), sum(a * b for a, b, _ in rows), sum(b * b for _, b, _ in rows)
    ac, bc = sum(a * c for a, _, c in rows), sum(b * c for _, b, c in rows)
    determinant = aa * bb - ab * ab
    if len(samples) < 2 or determinant <= 1e-12 * aa * bb:
        raise ValueError("moments of different sizes are needed to tell a bandwidth from a constant")
    constant, slope = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    if constant < 0:
        constant, slope = 0.0, bc / bb
    if slope <= 0:
        raise ValueError("the recorded moments leave no time for bytes: products alone take longer")
    return constant, 1 / slope


class _SampleBlock(nn.Module):
    """Each operator reads and writes as in most models."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows, width = x.shape
        parts = self.qkv(self.before(x)).view(batch, rows, 3, self.heads, width // self.heads).transpose(1, 3)
        q, k, v = parts.unbind(2)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, rows, width))
        u = self.up(self.between(x))
        u = 0.5 * u * (1.0 + torch.tanh(0.8 * (u + 0.045 * torch.pow(u, 3.0))))
        out: torch.Tensor = x + self.down(u)
        return out


class _Reference(nn.Module):
    def __init__(self, width: int, blocks: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(_SampleBlock(width, width // 64) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.norm(self.blocks(self.words(ids))))
        return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


REFERENCE = (512, 3, 4096)
BATCHES = ((2, 32), (2, 128))


def samples_of(workload: Workload, machine: Machine) -> list[Sample]:
    """Of moments with operators.

    machine: rates of products; its bandwidth and constant are not used.
    """
    layout = build_layout(workload)

    def moments_s(bytes_per_s: float) -> Sequence[float]:
        gpu = replace(machine.gpu, launch_s=0.0, operator_bytes_per_s=bytes_per_s)
        ranks = (replace(machine.ranks[0], gpu=gpu),)
        return CostModel(workload, replace(machine, name="not the recorded one", ranks=ranks), layout).moments_s

    # Seconds are linear in the bytes, so two bandwidths tell flops and bytes apart.
    rows = zip(workload.moments, moments_s(_NO_TIME), moments_s(1.0))
    return [Sample(flops_s, with_bytes_s - flops_s, m.duration_s) for m, flops_s, with_bytes_s in rows if m.duration_s]


def recorded_samples(machine: Machine) -> list[Sample]:
    """The reference model's, at each (batch, sequence).

    machine: as for `samples_of`, the executor's.
    """
    torch.manual_seed(0)
    model = _Reference(*REFERENCE)
    samples: list[Sample] = []
    for batch, rows in BATCHES:
        ids = torch.randint(REFERENCE[2], (batch, rows), generator=torch.Generator().manual_seed(0))
        w = record(
            model,
            [ids],
            machine,
            name="reference",
            optimizer=AdamW(lr=1e-4, max_grad_norm=1.0),
            loss=lambda module, one: module(one),
            timed=5,
            clock=time.thread_time,
        )
        samples += samples_of(w, machine)
    return samples


_LAYERS, _WIDTH, _ROWS = 60, 8, 4


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x).square().mean()
        return out


def python_s(device: Device, bench: Bench) -> float:
    """Seconds of Python and torch's dispatcher per moment: a step in plain torch of a tiny model."""
    model = _Tiny().to(device.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = _loop(model, optimizer, repeat(torch.ones(_ROWS, _WIDTH, device=device.device)))
    with device.using():
        seconds = bench.medians({"step": step}, device.timed)
    return seconds["step"] / (2 * _LAYERS)


def engine_overhead_s(device: Device, bench: Bench, machine: Machine) -> float:
    """That the engine adds to a moment, at least 0.

    machine: where the executor runs, with a few kilobytes.
    """
    optimizer = AdamW(lr=1e-4, max_grad_norm=1.0)
    x = torch.ones(_ROWS, _WIDTH)
    workload = record(
        _Tiny(), [x], machine, name="tiny", optimizer=optimizer, loss=lambda module, one: module(one), timed=0
    )
    plan = find_policy("all_on_gpu")(workload, machine, Settings(update="step", clip=True))
    seconds: dict[str, list[float]] = {"plain": [], "engine": []}
    with device.using():
        plain, own = _Tiny(), _Tiny()
        prepared, stepper = prepare(own, plan, optimizer)
        steps = {
            "plain": _loop(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True), repeat(x)),
            "engine": _loop(prepared, stepper, repeat(x)),
        }
        try:
            for number in range(3 + 10 * bench.effort.rounds):
                for name, step in steps.items():
                    start_s = time.thread_time()
                    step()
                    if number >= 3:
                        seconds[name].append(time.thread_time() - start_s)
        finally:
            stepper.session.close(restore=False)
    extra = statistics.median(seconds["engine"]) - statistics.median(seconds["plain"])
    return max(0.0, extra / len(plan.workload.moments))


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        loss = model(next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
