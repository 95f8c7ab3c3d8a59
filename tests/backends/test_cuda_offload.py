"""`executor.offload` on a CUDA device: the machine that a plan is made for. Needs a GPU that the catalog has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import executor
from pstar_sim.catalog.loader import load_catalog
from pstar_sim.core.plan import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none"),
]

GB = 10**9


def plan_made(gpu_memory: str | None) -> Plan:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plans: list[Plan] = []
    _, offloaded = executor.offload(
        model, optimizer, (torch.ones(8, 256, device="cuda"),), gpu_memory=gpu_memory, device="cuda",
        loss=lambda module, batch: module(*batch).square().mean(), on_plan=plans.append,
    )  # fmt: skip
    offloaded.session.close()
    return plans[0]


@pytest.mark.parametrize("without", ["", "nvidia-smi"])
def test_here_is_the_device_that_torch_has_and_gpu_memory_caps_it(
    without: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container often lacks nvidia-smi. At least 1 GB is kept of a cap of 2 GB, and of the whole card."""
    name, memory = torch.cuda.get_device_name(0), torch.cuda.mem_get_info()[1]
    known = {alias for entry in load_catalog().gpus.values() for alias in entry.values.device_names}
    if name not in known:
        pytest.skip(f"the catalog has no {name}")
    if without:
        monkeypatch.setenv("PATH", str(tmp_path))
    capped, whole = plan_made("2GB"), plan_made(None)
    assert capped.machine.gpu.name == whole.machine.gpu.name != "virtual"
    assert GB // 2 < capped.gpu_budget_bytes < 2 * GB <= whole.gpu_budget_bytes < memory
