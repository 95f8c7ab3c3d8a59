"""Collectives between two processes: gloo on CPUs, NCCL where there are two CUDA devices.

Each rank is a process (`python -m executor.calibration.wire RANK FILE BACKEND`); they meet through a file, and the
first prints seconds by size as JSON. An all-gather between two sends each part once, so its bytes over the seconds
beyond the latency is a rank's rate.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pstar_sim.catalog.curves import Curve

_SIZES = (4 << 10, 256 << 10, 1 << 20, 8 << 20, 32 << 20)
_REPEATS = 5
_TIMEOUT_S = 60.0


def from_seconds(seconds: dict[int, float]) -> tuple[Curve, float]:
    """(curve of bytes/s that a rank sends over the bytes of both parts, latency in s) from all-gather seconds by bytes
    of a part. The latency is the smallest part's seconds, beyond which rates are taken. Parts that take no longer are
    left out, but for the largest."""
    small, *others = sorted(seconds)
    rates = [(2.0 * size, (size - small) / max(seconds[size] - seconds[small], 1e-9)) for size in others]
    measurable = [(size, rate) for size, rate in rates[:-1] if seconds[int(size) // 2] > seconds[small]]
    return (*measurable, rates[-1]), seconds[small]


def collective_rates(*, timeout_s: float = _TIMEOUT_S) -> tuple[str, Curve, float] | str:
    """(backend, curve of bytes/s that a rank sends over bytes of a collective, latency in s), or why none."""
    import torch
    import torch.distributed

    if not torch.distributed.is_available():
        return "collectives: this torch was built without torch.distributed"
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices == 1:
        return "collectives: one CUDA device, and NCCL needs two"
    backend = "nccl" if devices >= 2 else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "executor.calibration.wire"]
        meeting = str(Path(folder) / "meeting")
        ranks = [
            subprocess.Popen([*command, str(rank), meeting, backend], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for rank in range(2)
        ]
        try:
            answers = [rank.communicate(timeout=timeout_s) for rank in ranks]
        except subprocess.TimeoutExpired:
            return f"collectives: {backend} did not answer within {timeout_s:g} s"
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.communicate()
    for rank, (_, complaint) in zip(ranks, answers):
        if rank.returncode:
            lines = complaint.decode(errors="replace").strip().splitlines()
            return f"collectives: {backend} failed: {lines[-1] if lines else rank.returncode}"
    table = {int(size): float(s) for size, s in json.loads(answers[0][0]).items()}
    return backend, *from_seconds(table)


def _rank(rank: int, meeting: str, backend: str) -> dict[int, float]:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
    )
    seconds: dict[int, float] = {}
    for size in _SIZES:
        own = torch.ones(size, dtype=torch.uint8, device=device)
        parts = [torch.empty_like(own) for _ in range(2)]
        taken = []
        for _ in range(_REPEATS + 2):
            distributed.barrier()
            start_s = time.perf_counter()
            distributed.all_gather(parts, own)
            if backend == "nccl":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start_s)
        seconds[size] = statistics.median(taken[2:])
    distributed.destroy_process_group()
    return seconds


if __name__ == "__main__":
    table = _rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    if sys.argv[1] == "0":
        sys.stdout.write(json.dumps(table) + "\n")
