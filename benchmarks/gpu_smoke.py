"""`make gpu-smoke`: four minutes that show whether longer runs are worth a card's time.

It checks versions and environment; the memory that the driver's context and a product take of the card; pinning; copies
both ways; the private memory pool from two threads; a wide MLP trained for three steps under two policies, beside plain
torch on the same device. Each line is printed, and kept, as it is known. If a part hangs, the stacks of all threads are
written and the process ends; the following parts run in a new process.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _keep import Keep, python_path, results_folder
from _results import RESULTS, write_result
from preflight import cannot_run, report

ROOT = Path(__file__).resolve().parents[1]
GIB, MIB = 1 << 30, 1 << 20
LAYERS, ROWS = 12, 64
WIDTH = {"cuda": 2048, "virtual": 256}  # a CPU only tries the script
Say = Callable[[str], object]


class Elsewhere(Exception):
    """A part that needs another device."""


def versions(device: str, say: Say) -> dict[str, Any]:
    import torch

    names = ("PYTORCH", "CUDA", "NVIDIA", "NCCL", "OMP", "MKL", "LD_PRELOAD")
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(names)},
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "cuda": torch.version.cuda,
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "allocator": torch.cuda.get_allocator_backend(),
            "gpus": torch.cuda.device_count(),
        }
    for name, value in found.items():
        say(f"{name}: {value}")
    return found


def context(device: str, say: Say) -> dict[str, Any]:
    """Returns the bytes on the card that are not torch's, and the bytes that a product's workspace adds to torch's."""
    import torch

    _only_on_a_card(device)

    def others() -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free - torch.cuda.memory_reserved())

    torch.cuda.init()
    torch.cuda.synchronize()
    found = {"context_bytes": others()}
    a = torch.ones(1024, 1024, device="cuda", requires_grad=True)
    before = torch.cuda.memory_allocated()
    (a @ a).sum().backward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before - a.numel() * 4  # the gradient of the input
    found |= {"context_after_product_bytes": others(), "workspace_bytes": held}
    for name, value in found.items():
        say(f"{name}: {value / MIB:.1f} MiB")
    return found


def pinning(device: str, say: Say) -> dict[str, Any]:
    import torch

    _only_on_a_card(device)
    found = {}
    for size in (1, 8):
        begun_s = time.perf_counter()
        pinned = torch.empty(size * GIB, dtype=torch.uint8, pin_memory=True)
        found[f"pin_{size}_gib_s"] = time.perf_counter() - begun_s
        say(f"{size} GiB pinned in {found[f'pin_{size}_gib_s']:.2f} s")
        del pinned
    empty = getattr(torch._C, "_host_emptyCache", None)
    found["goes_back"] = empty is not None
    say("pinned memory goes back" if empty else f"torch {torch.__version__} keeps pinned memory")
    if empty is not None:
        empty()
    return found


def copies(device: str, say: Say) -> dict[str, Any]:
    import torch

    _only_on_a_card(device)
    size = GIB
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def rate(ways: Sequence[int]) -> float:
        """Returns the bytes per second of the copies 0 (there) and 1 (back), issued together."""
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        for _ in range(4):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    target, source = (there[0], pinned[0]) if way == 0 else (pinned[1], there[1])
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 4 * len(ways) * size / (time.perf_counter() - begun_s)

    rate((0, 1))
    found = {"h2d": rate((0,)), "d2h": rate((1,)), "both": rate((0, 1))}
    for name, value in found.items():
        say(f"{name}: {value / 1e9:.1f} GB/s")
    return {f"{name}_bytes_per_s": value for name, value in found.items()}


def pool(device: str, say: Say) -> dict[str, Any]:
    """Let two threads take and give payloads of one private pool, each with a pattern of its own that must stay intact.
    Then free memory is given back, and at the end all memory."""
    import torch

    from executor.devices.cuda_blocks import Blocks, set_up_allocator

    _only_on_a_card(device)
    set_up_allocator()
    block, rounds = 32 * MIB, 100
    before = torch.cuda.memory_reserved()
    blocks = Blocks(torch.device("cuda", 0))
    blocks.expect((block, 8 * block), 16 * block)
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            payloads = [blocks.payload(block, torch.uint8) for _ in range(3)]
            for turn in range(rounds):
                payload = payloads[turn % 3]
                blocks.grow(payload)
                payload.fill_(number * 100 + turn % 100)
                torch.cuda.current_stream().synchronize()
                if int(payload[::MIB].float().mean()) != (number * 100 + turn % 100) % 256:
                    wrong.append(f"thread {number}, round {turn}: another's bytes")
                blocks.shrink(payload)
        except Exception as error:
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: dict[str, Any] = {"s": time.perf_counter() - begun_s, "pool_bytes": blocks.pool_bytes}
    found["given_back_bytes"] = blocks.give_back()
    blocks.close()
    found |= {"left_bytes": torch.cuda.memory_reserved() - before, "exchanges": blocks.exchanges}
    say(f"{rounds} rounds of two threads in {found['s']:.2f} s, pool of {found['pool_bytes'] / MIB:.0f} MiB")
    say(f"given back {found['given_back_bytes'] / MIB:.0f} MiB, left {found['left_bytes'] / MIB:.0f} MiB")
    if wrong:
        raise AssertionError("; ".join(wrong[:5]))
    return found


def training(device: str, say: Say) -> dict[str, Any]:
    """Returns the largest difference of parameters and losses from plain torch with AdamW(fused=True) on the same
    device."""
    import torch
    from torch import nn

    import executor
    from executor.capture import capture_module
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.core.plan import Settings
    from pstar_sim.policy.registry import find_policy

    where, width = "cuda" if device == "cuda" else "cpu", WIDTH[device]

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width, bias=False), nn.ReLU())]
        return nn.Sequential(*layers)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1))
    workload = capture_module(Loss(), (x,), name="wide", batch=ROWS, sequence=1)
    x = x.to(where)
    plain = Loss().to(where)
    adam = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)

    def steps(module: nn.Module, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(3):
            loss = module(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    expected = steps(plain, adam)
    say(f"plain torch: losses {expected}")
    reference = {name: value.detach().cpu() for name, value in plain.named_parameters()}
    machine = load_machine("virtual", gpu_memory=workload.peak_non_model_bytes + 5 * width * width * 4)
    found: dict[str, Any] = {}
    for policy in ("static_partition", "tide"):
        plan = find_policy(policy)(workload, machine, Settings(clip=False))
        begun_s = time.perf_counter()
        mine, optimizer = executor.prepare(
            Loss(), plan, executor.AdamW(lr=1e-4), device="cuda" if device == "cuda" else "virtual"
        )
        session = optimizer.session
        try:
            losses = steps(mine, optimizer)
            values = mine.state_dict()
            row = {
                "s": time.perf_counter() - begun_s,
                "loss_apart": max(abs(a - b) / abs(b) for a, b in zip(losses, expected)),
                "parameters_apart": max(
                    float((values[name].cpu() - value).abs().max() / value.abs().max())
                    for name, value in reference.items()
                ),
                "deviations": session.deviations,
                "exchanges": getattr(session.backend, "exchanges", None),
                "host_wait_s": getattr(session.queues, "host_wait_s", None),
            }
        finally:
            session.close(restore=False)
        say(f"{policy}: {row}")
        found[policy] = row
        if row["deviations"] or row["loss_apart"] > 1e-4 or row["parameters_apart"] > 1e-4:
            raise AssertionError(f"{policy} is not plain training: {row}")
    return found


def _only_on_a_card(device: str) -> None:
    if device != "cuda":
        raise Elsewhere("needs a card")


PARTS: dict[str, Callable[[str, Say], dict[str, Any]]] = {
    "versions": versions, "context": context, "pinning": pinning, "copies": copies, "pool": pool, "training": training,
}  # fmt: skip


def inside(args: argparse.Namespace, partial: Path) -> None:
    """Run the parts one after the other, in a process of its own; each part's figures are a line of the file.

    A part whose time is up ends the process by SIGALRM, after its stacks are written. The signal stops the thread that
    it reads, whatever C code that thread hangs in; the thread of faulthandler.dump_traceback_later reads frames while
    they change, and has crashed.
    """
    faulthandler.register(signal.SIGALRM, chain=True)
    for name in args.parts:
        append(partial, {"begun": name})
        print(f"-- {name}", flush=True)
        signal.setitimer(signal.ITIMER_REAL, args.part_limit_s)
        begun_s = time.perf_counter()
        try:
            result = PARTS[name](args.device, lambda line, name=name: print(f"{name}: {line}", flush=True))
        except Elsewhere as why:
            result = {"skipped": str(why)}
            print(f"{name}: skipped: {why}", flush=True)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        append(partial, {"part": name, "took_s": round(time.perf_counter() - begun_s, 2), "result": result})


def append(partial: Path, row: dict[str, Any]) -> None:
    with partial.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def done_parts(partial: Path) -> dict[str, dict[str, Any]]:
    lines = partial.read_text(encoding="utf-8").splitlines() if partial.exists() else ()
    found = {}
    for row in (json.loads(line) for line in lines if line.endswith("}")):
        if "part" in row:
            found[row["part"]] = row["result"]
        elif "again" in row:
            del found[row["again"]]
    return found


def run(keep: Keep, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    ends_s = time.monotonic() + 60 * args.minutes
    if args.again:
        for name, row in done_parts(keep.partial).items():
            if "failed" in row:
                append(keep.partial, {"again": name})
    while True:
        left = [name for name in args.parts if name not in done_parts(keep.partial)]
        left_s = ends_s - time.monotonic()
        if not left or left_s < 1:
            return done_parts(keep.partial)
        status, _ = keep.run(
            [
                sys.executable, str(Path(__file__).resolve()), "--inside", str(keep.partial.resolve()), "--device",
                args.device, "--parts", ",".join(left), "--part-limit-s", str(args.part_limit_s),
            ],
            limit_s=left_s,
            cwd=ROOT,
            environment={"PYTHONPATH": python_path(ROOT, ROOT / "benchmarks")},
        )  # fmt: skip
        broken = next((name for name in args.parts if name not in done_parts(keep.partial)), None)
        if broken is not None:
            why = f"the process ended with status {status}"
            if status == -signal.SIGALRM:
                why = f"longer than {args.part_limit_s:g} s"
            keep.say(f"{broken}: {why}")
            append(keep.partial, {"part": broken, "result": {"failed": why}})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0, help="of this run")
    parser.add_argument("--fresh", action="store_true", help="forget the parts that a run before this one did")
    parser.add_argument("--again", action="store_true", help="run what failed again")
    parser.add_argument(
        "--out", type=results_folder, help=f"folder of what is found (default: {RESULTS.relative_to(ROOT)})"
    )
    parser.add_argument("--device", choices=("cuda", "virtual"), default="cuda", help="virtual: to try this script")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--part-limit-s", type=float, default=75.0, help="of one part")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"--parts: {name!r} is not known; choose from {', '.join(PARTS)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.inside is not None:
        inside(args, args.inside)
        return 0
    if (status := cannot_run("gpu-smoke", ("numpy", "scipy"), device=args.device == "cuda")) is not None:
        return status
    keep = Keep(args.out or RESULTS, "gpu_smoke")
    if args.fresh or args.out is None:
        keep.partial.unlink(missing_ok=True)
    keep.say(report())
    found = run(keep, args)
    failed = {name: row["failed"] for name, row in found.items() if "failed" in row}
    for name, why in failed.items():
        keep.say(f"failed: {name}: {why}")
    keep.say(f"written: {write_result('gpu_smoke', {'device': args.device, 'parts': found}, folder=args.out)}")
    return int(bool(failed) or len(found) < len(args.parts))


if __name__ == "__main__":
    raise SystemExit(main())
