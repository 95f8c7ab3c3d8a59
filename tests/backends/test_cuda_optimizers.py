"""Optimizers on a CUDA device: the numbers of the plain ones there, updated on the device and on the host. Needs a GPU.

On the emulated device (tests/cuda_emulation) operators are the CPU's, so that all is equal to the bit. bitsandbytes'
CUDA library does not load there: it wants cudaMemPrefetchAsync, and has kernels of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain_loop import train
from torch import nn

import executor
from pstar_sim.core.plan import Settings
from pstar_sim.workload.workload import repeat_micro_batch, with_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none"),
]

EMULATED = "EMULATED_CUDA_SEED" in os.environ
WIDTH = 72
BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


def net(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).to(dtype)


def batches(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(4, WIDTH, generator=draw).to("cuda", dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch).float() ** 2).mean()
    return loss


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is both] for both in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    kind = pytest.importorskip("transformers.optimization").Adafactor
    return [kind(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False)]


def in_8_bits(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [pytest.importorskip("bitsandbytes.optim").AdamW8bit(model.parameters(), lr=1e-2)]


PLAIN: dict[str, tuple[Callable[[nn.Module], list[torch.optim.Optimizer]], Callable[[], Any]]] = {
    "adam": (
        lambda model: [torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)],
        lambda: executor.Adam(lr=1e-2, weight_decay=0.1),
    ),
    "sgd": (
        lambda model: [torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, foreach=False)],
        lambda: executor.SGD(lr=1e-1, momentum=0.9),
    ),
    "adafactor": (adafactor, lambda: executor.Adafactor(lr=1e-2, relative_step=False, scale_parameter=False)),
    "muon": (muon, lambda: executor.Muon(lr=1e-2, rest=executor.AdamW(lr=1e-2))),
    "adamw-8bit": (in_8_bits, lambda: executor.BnbAdamW(lr=1e-2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("policy", "micro_batches"), [("tide", 4), ("optimal", 1), ("all_on_gpu", 4)])
@pytest.mark.parametrize("name", PLAIN)
def test_is_the_plain_optimizer(kit: Any, name: str, policy: str, micro_batches: int, dtype: torch.dtype) -> None:
    """Pure bf16 has no masters. Of bitsandbytes, the reference and every update are where its kernels are."""
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    if name == "adamw-8bit" and (EMULATED or not BITSANDBYTES):
        pytest.skip("no bitsandbytes, or none of its CUDA kernels")
    make, describe = PLAIN[name]
    reference, model = net(dtype).cuda(), net(dtype)
    theirs = train(reference, make(reference), batches(dtype), 4, micro_batches, loss_of=loss_of)
    batch = torch.zeros(4, WIDTH, dtype=dtype)
    workload = executor.capture_module(model, batch, groups=describe(), loss=loss_of, device="cuda")
    whole = with_optimizer(repeat_micro_batch(workload, micro_batches), masters="none")
    sums = "16-bit" if dtype is torch.bfloat16 else "32-bit"
    plan = kit.tight_plan(policy, whole, Settings(clip=False, update="step", sums=sums))
    _, optimizer = executor.prepare(model, plan, describe(), device="cuda")
    mine = train(model, optimizer, batches(dtype), 4, micro_batches, loss_of=loss_of)
    session = optimizer.session
    assert session.deviations == 0
    assert policy == "all_on_gpu" or session.status().links["h2d"].moved_bytes > 0
    session.close()
    if EMULATED:
        assert mine == theirs
        assert all(torch.equal(p.cpu(), q.cpu()) for p, q in zip(model.parameters(), reference.parameters()))
    else:  # an update on the host is rounded in another way than one on the device
        assert mine == pytest.approx(theirs, rel=2e-2 if dtype is torch.bfloat16 else 1e-4)


def test_stochastic_rounding_has_the_same_bits_on_the_device_and_on_the_host(kit: Any) -> None:
    dtype = torch.bfloat16
    ends = []
    for policy in ("all_on_gpu", "zero_offload"):
        model = net(dtype)
        spec = executor.SGD(lr=1e-1, rounding="stochastic")
        workload = executor.capture_module(
            model, torch.zeros(4, WIDTH, dtype=dtype), groups=spec, loss=loss_of, device="cuda"
        )
        plan = kit.tight_plan(policy, with_optimizer(workload, masters="none"), Settings(clip=False, update="step"))
        _, optimizer = executor.prepare(model, plan, spec, device="cuda")
        train(model, optimizer, batches(dtype), 4, loss_of=loss_of)
        optimizer.session.close()
        ends.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*ends))


def test_autocast_over_fp32_weights(kit: Any) -> None:
    """Its casts are cached for the time of a forward; the weights leave meanwhile."""
    reference, model = net(torch.float32), net(torch.float32)

    def cast(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return loss_of(module, batch)

    def run(module: nn.Module, optimizer: Any) -> list[float]:
        losses, rows = [], batches(torch.float32)
        for _ in range(4):
            loss = cast(module, next(rows))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    reference.cuda()
    theirs = run(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True))
    spec = executor.AdamW(lr=1e-2)
    workload = executor.capture_module(model, torch.zeros(4, WIDTH), groups=spec, loss=cast, device="cuda")
    _, optimizer = executor.prepare(
        model, kit.tight_plan("tide", workload, Settings(clip=False, update="step")), spec, device="cuda"
    )
    mine = run(model, optimizer)
    assert optimizer.session.deviations == 0
    optimizer.session.close()
    if EMULATED:
        assert mine == theirs
    else:
        assert mine == pytest.approx(theirs, rel=2e-2)
