"""Processes of a run on several ranks of which one gets into trouble. Started by test_lost_ranks.py:
`python rank_trouble.py FOLDER LIMIT_S`, cases in FOLDER/cases.json ({"name", "ranks", "streams", "cuda"}).

Everything is imported once. A few cases run at a time, since most of their time is waiting. Each forks its processes,
whose output goes to FOLDER/NAME.RANK.txt and whose end (exit code, seconds after the trouble) to FOLDER/NAME.json.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import conftest as kit
import rank_worker
import torch
import torch.distributed as dist

import executor
from executor.distributed.ranks import count_of
from executor.training import train_step
from pstar_sim.core.plan import Plan

ITERATION = 2  # in which it happens
AT_ONCE = 3  # cases
LIVES_S = 400.0  # at most: what stands still or ends early lives on until another rank has ended
ODD_COUNTS = {"negative count": -2, "nan count": float("nan"), "infinite count": float("inf"), "no count": "two"}


def loop(name: str, plan: Plan, rank: int, folder: Path, streams: bool = False, device: str = "virtual") -> None:
    """A user's training loop; rank 1 does something in iteration ITERATION that it should not."""
    model, draw = kit.build("mlp-4")
    lr = 2e-3 if name == "another lr" and rank == 1 else 1e-3
    spec = executor.AdamW(lr=lr, max_grad_norm=1.0)
    backend = rank_worker.streams_of(rank) if streams else None
    if name.startswith("no memory"):
        backend = executor.VirtualBackend(gpu_bytes=2 * plan.gpu_budget_bytes)  # a slice moves through more
    limit_s = 3.0 if name in ("stands still", "waits elsewhere") else 600.0

    def count(args: Any, kwargs: Any) -> Any:
        odd = ODD_COUNTS.get(name) if rank == 1 and iteration == ITERATION else None
        return count_of(args, kwargs) if odd is None else odd

    model, optimizer = executor.prepare(
        model, plan, spec, watchdog_s=5.0, backend=backend, device=device, timeout_s=limit_s, count=count
    )
    ranks = optimizer.session.ranks
    ranks._timeout_s = 600.0  # until the trouble begins: who is slow is waited for
    place = torch.device("cpu" if device == "virtual" else device)
    generator = torch.Generator().manual_seed(rank)

    def batches() -> Iterator[Any]:
        while True:
            yield rank_worker.moved(draw(generator), place)

    rows = batches()
    for iteration in range(5):
        here = rank == 1 and iteration == ITERATION
        if iteration == ITERATION:
            ranks._timeout_s = limit_s
        if here:
            (folder / f"{name}.begun").write_text(str(time.time()))
        if here and name == "killed between":
            os.kill(os.getpid(), signal.SIGKILL)
        if here and name in ("ends early", "evaluates on"):
            optimizer.session.close(restore=False)
            _live_on(folder / f"{name}.others")
            return
        if here and name == "no memory":  # inside the forward: before it, what is left of the last iteration may be hit
            model.layers[1].register_forward_hook(partial(_shrunk, backend, plan.gpu_budget_bytes // 3))
        if here and name == "no memory of torch's":
            model.layers[3].register_forward_hook(_refused)
        if here and name == "stands still":
            _live_on(folder / f"{name}.others")
        if here and name == "exception":
            raise KeyError("a bug in the user's loop")
        if here and name == "nan":
            rows = iter([{k: v * float("nan") for k, v in draw(generator).items()}])
        if here and name == "evaluates inside":
            kit.loss_of(model, next(rows)).backward()
            with torch.no_grad():
                kit.loss_of(model, next(rows))
        if here and name == "waits elsewhere":
            dist.barrier()
        if iteration == ITERATION and name in ("evaluates on", "waits elsewhere") and rank == 0:
            with torch.no_grad():
                kit.loss_of(model, next(rows))
        if iteration == ITERATION and name == "reads alone" and rank == 0:
            model.state_dict()
        if iteration == ITERATION and name == "read apart":
            model.layers[rank].weight.sum()
        if here and name == "adam dies":
            optimizer.session.contents.adam = _breaks  # the thread of the adam queue
        if name.startswith("killed inside"):
            loss = kit.loss_of(model, next(rows))
            if here:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            train_step(model, optimizer, rows, 1, number=iteration)


def _live_on(ended: Path) -> None:
    """Until the file is there."""
    until_s = time.monotonic() + LIVES_S
    while time.monotonic() < until_s and not ended.exists():
        time.sleep(0.05)


def _shrunk(backend: executor.VirtualBackend, gpu_bytes: int, *_: Any) -> None:
    backend.gpu_bytes = gpu_bytes


def _refused(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has ...")


def _breaks(*_: Any) -> None:
    raise OSError("the disk of the adam thread is on fire")


def planned_ranks(case: dict[str, Any]) -> int:
    """Ranks of the case's plan."""
    return 3 if case["name"] == "another P" else int(case["ranks"])


def run(case: dict[str, Any], plan: Plan, folder: Path, limit_s: int) -> dict[str, Any]:
    name, ranks = case["name"], case["ranks"]
    children: dict[int, int] = {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            out = os.open(folder / f"{name}.{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            faulthandler.dump_traceback_later(limit_s, exit=True)
            dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.store", rank=rank, world_size=ranks)
            device = f"cuda:{rank}" if case.get("cuda") else "virtual"
            _leave(partial(loop, name, plan, rank, folder, bool(case.get("streams")), device))
        children[child] = rank
    ends: dict[int, list[float]] = {}
    while children:
        child, status = os.wait()
        ends[children.pop(child)] = [os.waitstatus_to_exitcode(status), time.time()]
        (folder / f"{name}.others").touch()
    begun = folder / f"{name}.begun"
    since = float(begun.read_text()) if begun.exists() else 0.0
    return {"ends": {rank: [code, at - since] for rank, (code, at) in ends.items()}}


def _leave(action: Callable[[], None]) -> None:
    """Run the action as a script would, down to the interpreter's own end."""
    raise _Script(action)


class _Script(BaseException):
    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action


def main() -> None:
    folder, limit_s = Path(sys.argv[1]), int(sys.argv[2])
    cases = json.loads((folder / "cases.json").read_text())
    numbers = sorted({planned_ranks(case) for case in cases})
    plans = rank_worker.plans_of([{"policy": "tide", "ranks": number, "clip": 1.0} for number in numbers])
    plan_of = dict(zip(numbers, plans, strict=True))
    gc.freeze()  # what was imported: no process goes through it when it ends
    running = 0
    for case in cases:
        if running == AT_ONCE:
            _await_one()
            running -= 1
        if os.fork() == 0:
            result = run(case, plan_of[planned_ranks(case)], folder, limit_s)
            (folder / f"{case['name']}.json").write_text(json.dumps(result))
            os._exit(0)
        running += 1
    for _ in range(running):
        _await_one()


def _await_one() -> None:
    _, status = os.wait()
    if status:
        raise RuntimeError(f"a case ended with exit code {os.waitstatus_to_exitcode(status)}; its traceback is above")


if __name__ == "__main__":
    try:
        main()
    except _Script as script:
        action = script.action
    else:
        action = None
    if action is not None:
        action()
