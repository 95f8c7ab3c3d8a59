"""Two processes that train, save, go on and resume. Started by test_checkpoint_ranks.py: `python checkpoint_worker.py
FOLDER LIMIT_S`; writes FOLDER/CASE.RANK.json. The same twice, from one process' checkpoint to two and back."""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import conftest as kit
import torch
import torch.distributed as dist
from rank_worker import tight_plan
from torch.nn.parallel import DistributedDataParallel

import executor
from executor.saving.manifest import MANIFEST
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Place
from pstar_sim.errors import CheckpointError
from pstar_sim.workload.workload import Workload

LAYERS = 1  # with the embedding, which is the head too: 16 tensors, each read by meetings of the ranks
CASES = {"tide": torch.float32, "zero3_resident": torch.bfloat16, "all_on_gpu": torch.float32}


@functools.cache
def captured(dtype: torch.dtype) -> Workload:
    model, draw = kit.build("gpt2", layers=LAYERS)
    w: Workload = kit.workload_of(model.to(dtype), draw(torch.Generator().manual_seed(9)))
    return w


@functools.cache
def planned(policy: str, dtype: torch.dtype, ranks: int, host_share: float | None) -> Plan:
    return tight_plan(policy, captured(dtype), Settings(clip=False, update="step"), ranks, host_share=host_share)


def prepared(
    policy: str, dtype: torch.dtype, ranks: int, group: Any, weights: Any = None, disks: Path | None = None
) -> Any:
    """(model, optimizer, batches of a rank).

    disks: a folder for states, on a host that has no room for them.
    """
    model, draw = kit.build("gpt2", layers=LAYERS)
    model.to(dtype)
    plan = planned(policy, dtype, ranks, None if disks is None else 0.6)
    assert any(row.place is Place.NVME for row in plan.initial) == (disks is not None)
    spec = executor.AdamW(lr=1e-2, weight_decay=0.1)
    model, optimizer = executor.prepare(
        model, plan, spec, group=group, watchdog_s=5.0, weights=weights, disks=[] if disks is None else [disks]
    )
    return model, optimizer, draw


def run(model: Any, optimizer: Any, draw: Any, rank: int, steps: int, seed: int) -> list[float]:
    rows = kit.batches(draw, seed=10 * seed + rank)
    return [kit.train_alone(model, optimizer, rows, 1) for _ in range(steps)]


def values(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {n: torch.as_tensor(t).clone() for n, t in model.state_dict().items()}
    for number, row in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{key}": torch.as_tensor(t).clone() for key, t in row.items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def case(policy: str, dtype: torch.dtype, rank: int, folder: Path, alone: Any, both: Any) -> dict[str, Any]:
    two = folder / f"{policy}-two"
    model, optimizer, draw = prepared(policy, dtype, 2, both)
    run(model, optimizer, draw, rank, 2, seed=1)
    optimizer.save(two, extra={"rank": rank})
    saved = values(model, optimizer)
    curve = run(model, optimizer, draw, rank, 2, seed=2)
    after = values(model, optimizer)
    restored = optimizer.load(two)
    result: dict[str, Any] = {
        "restored": same(values(model, optimizer), saved),
        "extra": restored.extra,
        "goes on": run(model, optimizer, draw, rank, 2, seed=2) == curve and same(values(model, optimizer), after),
        "files": sorted(p.name for p in two.iterdir()),
        "sliced": optimizer.session.contents.sliced,
    }
    # A damaged file on disk: every rank says so, and goes on.
    if rank == 0:
        (two / MANIFEST).rename(two / "away")
    both_wait(both)
    try:
        optimizer.load(two)
        result["damaged"] = "loaded"
    except CheckpointError as error:
        result["damaged"] = str(error)
    both_wait(both)
    if rank == 0:
        (two / "away").rename(two / MANIFEST)
        flip(two / "optimizer-rank1.safetensors")
    both_wait(both)
    try:
        optimizer.load(two)
        result["flipped"] = "loaded"
    except CheckpointError as error:
        result["flipped"] = str(error)
    result["after the flip"] = same(values(model, optimizer), after)
    both_wait(both)
    if rank == 0:
        flip(two / "optimizer-rank1.safetensors")
    both_wait(both)
    optimizer.session.close(restore=False)

    one = folder / f"{policy}-one"
    if rank == 0:  # from two to one
        model, optimizer, draw = prepared("tide", dtype, 1, alone, weights=two)
        optimizer.load(two)
        result["to one"] = same(values(model, optimizer), saved)
        run(model, optimizer, draw, 0, 1, seed=3)
        optimizer.save(one)
        torch.save(values(model, optimizer), folder / "one.pt")
        optimizer.session.close(restore=False)
    both_wait(both)
    model, optimizer, draw = prepared(policy, dtype, 2, both)  # and from one to two
    optimizer.load(one)
    result["to two"] = same(values(model, optimizer), torch.load(folder / "one.pt"))
    curve = run(model, optimizer, draw, rank, 2, seed=4)
    after = values(model, optimizer)
    optimizer.session.close(restore=False)
    if policy == "tide":  # the same with states on disks, and in plain PyTorch
        model, optimizer, draw = prepared(policy, dtype, 2, both, disks=folder)
        optimizer.load(one)
        result["on disks"] = run(model, optimizer, draw, rank, 2, seed=4) == curve
        result["on disks"] &= same(values(model, optimizer), after)
        optimizer.session.close(restore=False)
        plain_curve, plain_values = plain(torch.load(folder / "one.pt"), rank, both)
        result["plain"] = plain_curve == curve and same(plain_values, after)
    return result


def plain(start: dict[str, torch.Tensor], rank: int, group: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What DistributedDataParallel makes of these values and states: losses, and values after them."""
    model, draw = kit.build("gpt2", layers=LAYERS)
    model.load_state_dict({name: value for name, value in start.items() if name in model.state_dict()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for number, key in (name.split("/") for name in start if "/" in name):
        state.setdefault(int(number), {})[key] = start[f"{number}/{key}"].float()
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
    curve = run(DistributedDataParallel(model, process_group=group), optimizer, draw, rank, 2, seed=4)
    return curve, values(model, optimizer)


def flip(path: Path) -> None:
    """One bit of the file's last byte is another; twice, it is as it was."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def both_wait(group: Any) -> None:
    dist.barrier(group)


def main() -> None:
    folder = Path(sys.argv[1])
    kit.build("gpt2")  # imports transformers, before the fork
    gc.freeze()  # what was imported: no process goes through it when it ends
    child = os.fork()
    rank = 0 if child else 1
    faulthandler.dump_traceback_later(int(sys.argv[2]), exit=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    alone, both = dist.new_group([0]), dist.new_group([0, 1])
    for policy, dtype in CASES.items():
        try:
            result = case(policy, dtype, rank, folder, alone, both)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
            (folder / f"{policy}.{rank}.json").write_text(json.dumps(result))
            break
        (folder / f"{policy}.{rank}.json").write_text(json.dumps(result))
    if child:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
