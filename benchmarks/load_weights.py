"""Peak host memory of `prepare(..., weights=FOLDER)` against its formula, every term of it, on GPT-2 124M.

    peak  <=  baseline + slabs + virtual gpu + buffers + one shard

baseline: interpreter, torch, transformers, plan and a model without memory, measured just before. slabs: host memory of
    the plan's chunks, powers of two. virtual gpu: payloads that the plan has on the gpu at the cut and while the first
    iteration's fetches run (its "gpu" is host memory too; on CUDA this term is 0). buffers: of the model. one shard:
    the bytes that the goal allows for reading; reading takes one piece of 4 MiB. The measured figure is VmHWM of a
    process of its own, whose mark is reset just before `prepare` (ru_maxrss where the system does not allow that).
    Files are read with pread, so their pages are the system's and not memory of the process.

It also measures saving and loading a checkpoint (which take one piece each), a step of training, and the ordinary way,
where the model is in memory first. What checksums cost is measured apart: loading with and without them, in turns, and
the rates of XXH3 and of zlib's CRC32 over pieces in memory, which is what a save adds. The file of plain states is what
a Trainer's checkpoint has beside.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

SHARD = "64MB"
TURNS = 3
CASES = (
    # name, policy, dtype of the plan, dtype of the file, gpu memory
    ("tide, fp32 file into bf16", "tide", "bf16", "fp32", "900MB"),
    ("zero_offload, bf16 file into fp32", "zero_offload", "fp32", "bf16", "1400MB"),
    ("all_on_gpu: states pinned, no host room", "all_on_gpu", "bf16", "bf16", "6GB"),
)


def status(field: str) -> int:
    """Returns the bytes of a line of /proc/self/status; without that file the most memory ever (ru_maxrss)."""
    path = Path("/proc/self/status")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def make(folder: Path) -> None:
    """Write the weights in both dtypes, in shards."""
    from executor.models import TORCH_DTYPES, build

    model = build("gpt2", batch=1, sequence=16, dtype="fp32").module
    for name in ("fp32", "bf16"):
        model.to(TORCH_DTYPES[name]).save_pretrained(folder / name, max_shard_size=SHARD)  # type: ignore[operator]


def plan(policy: str, dtype: str, gpu_memory: str, path: Path) -> None:
    from executor.capture import capture
    from pstar_sim.catalog.loader import load_machine
    from pstar_sim.core.plan import Settings
    from pstar_sim.policy.registry import find_policy

    workload = capture("gpt2", batch=1, sequence=16, dtype=dtype)
    made = find_policy(policy)(workload, load_machine("virtual", gpu_memory=gpu_memory), Settings(clip=False))
    made.save(path)


def measure(plan_path: Path, weights: Path, meta: bool, folder: Path) -> dict[str, Any]:
    """Measure in one process. Returns the bytes of every term, and the marks after prepare, a step, a save and a
    load."""
    from executor import AdamW, prepare
    from executor.models import build
    from executor.saving.plain_states import write_plain_states
    from executor.training import train_step
    from pstar_sim.core.plan import load_plan
    from pstar_sim.core.step import Place
    from pstar_sim.core.workspace import PIECE_BYTES

    chosen = load_plan(plan_path)
    chosen.check()
    built = build("gpt2", batch=1, sequence=16, dtype=chosen.workload.dtype, empty=meta)
    baseline = status("VmRSS")
    exact = reset_peak()
    model, optimizer = prepare(built.module, chosen, AdamW(lr=1e-4), weights=weights if meta else None, check=False)
    session = optimizer.session
    session.queues.pause()
    after = status("VmHWM")
    terms = {
        "baseline": baseline,
        "slabs": session.arena.slabs.room.total_bytes,
        "virtual_gpu": session.arena.peak_gpu_payload_bytes,
        "buffers": sum(b.numel() * b.element_size() for b in model.buffers()),
    }
    session.queues.resume()
    found: dict[str, Any] = {
        "terms": terms,
        "piece": PIECE_BYTES,
        "shard": max(p.stat().st_size for p in weights.glob("*.safetensors")),
        "steady": sum(terms.values()),
        "peak": after,
        "exact_mark": exact,
        "host_payload_bytes": session.arena.payload_bytes(Place.HOST),
        "model_bytes": sum(t.bytes for t in chosen.workload.tensors if t.tied_to is None),
    }
    if meta:
        batches = iter([built.example_batch])
        train_step(model, optimizer, batches, 1)
        with session.still():
            found["peak_after_training"] = status("VmHWM")
        for name, action in (("save", optimizer.save), ("load", optimizer.load)):
            before = status("VmRSS")
            reset_peak()
            begun_s = time.perf_counter()
            action(folder / "checkpoint")
            found[f"{name}_s"] = time.perf_counter() - begun_s
            found[f"{name}_adds"] = status("VmHWM") - before
        found |= load_times(optimizer, folder / "checkpoint")
        begun_s = time.perf_counter()
        write_plain_states(optimizer, folder / "optimizer.pt")
        found["plain_states_s"] = time.perf_counter() - begun_s
        found["plain_states_bytes"] = (folder / "optimizer.pt").stat().st_size
        found["checkpoint_bytes"] = sum(p.stat().st_size for p in (folder / "checkpoint").iterdir())
    session.close(restore=False)
    return found


def load_times(optimizer: Any, folder: Path) -> dict[str, float]:
    """Returns the median seconds of loads with and without checksums, in turns, and the rates of checksums."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for checksums, times in seconds.items():
            begun_s = time.perf_counter()
            optimizer.load(folder, checksums=checksums)
            times.append(time.perf_counter() - begun_s)
    return {
        "load_checked_s": statistics.median(seconds[True]),
        "load_unchecked_s": statistics.median(seconds[False]),
        "xxh3_64_bytes_per_s": rate_of(xxhash.xxh3_64_intdigest),
        "crc32_bytes_per_s": rate_of(zlib.crc32),
    }


def rate_of(checksum: Callable[[bytes], int]) -> float:
    """Returns the median bytes per second of a checksum over a piece in memory."""
    piece, seconds = random.Random(0).randbytes(16 << 20), []
    for _ in range(9):
        begun_s = time.perf_counter()
        checksum(piece)
        seconds.append(time.perf_counter() - begun_s)
    return len(piece) / statistics.median(seconds)


def child(*arguments: str) -> Any:
    """Run a part of this file in a process of its own. Returns the JSON of its last line."""
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def describe(found: dict[str, Any]) -> list[str]:
    def mb(size: int) -> str:
        return f"{size / 1e6:,.1f} MB"

    steady, peak = found["steady"], found["peak"]
    allowed = steady + found["shard"]
    verdict = "within" if peak <= allowed else "OVER"
    over = f"{(peak - steady) / 1e6:+,.1f} MB from the steady state; reading takes a piece of {mb(found['piece'])}"
    rows = {**found["terms"], "steady state": steady, "with one shard": allowed, "measured peak": peak}
    saving = f"saving a checkpoint of {mb(found['checkpoint_bytes'])} takes {mb(found['save_adds'])} more"
    checked, unchecked = found["load_checked_s"], found["load_unchecked_s"]
    times = f"saved in {found['save_s']:.1f} s, loaded in {checked:.1f} s, without checksums in {unchecked:.1f} s"
    plain = f"plain states of {mb(found['plain_states_bytes'])} in {found['plain_states_s']:.1f} s"
    rates = [f"{name} {found[f'{name}_bytes_per_s'] / 1e9:.1f} GB/s" for name in ("xxh3_64", "crc32")]
    return [
        *(f"{name:16} {mb(size):>12}" for name, size in rows.items()),
        f"{verdict}: {over}",
        f"{saving}, loading it {mb(found['load_adds'])}",
        f"{times}; {', '.join(rates)}; {plain}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    if args.part:
        part, *rest = args.part
        if part == "make":
            make(Path(rest[0]))
        elif part == "plan":
            plan(rest[0], rest[1], rest[2], Path(rest[3]))
        else:
            found = measure(Path(rest[0]), Path(rest[1]), rest[2] == "meta", Path(rest[3]))
            sys.stdout.write("\n" + json.dumps(found) + "\n")
        return
    rows = []
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        child("make", folder)
        for number, (name, policy, dtype, stored, memory) in enumerate(CASES[: args.cases]):
            child("plan", policy, dtype, memory, str(here / "plan.json"))
            print(f"{name} (GPT-2 124M, shards of {SHARD})")
            for way in ("meta", "memory") if number == 0 else ("meta",):
                work = here / f"{number}-{way}"
                work.mkdir()
                found = child("measure", str(here / "plan.json"), str(here / stored), way, str(work))
                rows.append({"case": name, "way": way, **found})
                if way == "memory":
                    print(f"  the ordinary way (model in memory first): {found['peak'] / 1e6:,.0f} MB at its peak")
                    continue
                missed += found["peak"] > found["steady"] + found["shard"]
                for line in describe(found):
                    print("  " + line)
    if not args.no_write:
        from _results import write_result

        write_result("load_weights", {"rows": rows, "all_within": missed == 0})
    raise SystemExit(1 if missed else 0)


if __name__ == "__main__":
    main()
