"""Seconds of a cold 1,000-point sweep: 4 machines x 10 models x 5 batches x the five policies of the main job.

Everything counts, from reading the grid and starting the processes to the results file. Writes results/sweep.json.
Fails above 60 s. `--profile` instead shows where the CPU time of one group of points per model goes, in this process.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import sys
import tempfile
import time
from pathlib import Path

from _results import write_result
from joblib.externals.loky import get_reusable_executor

import pstar_sim as ps
from pstar_sim.planner.grid import load_grid
from pstar_sim.planner.sweep import evaluate

LIMIT_S = 60.0
GRID = {
    "machine": ["v100-32", "a100-80", "rtx4090", "h100-80"],
    "model": ["1B", "2B", "4B", "6B", "8B", "10B", "11B", "12B", "15B", "18B"],
    "batch": [1, 2, 4, 8, 16],
    "seq": 1024,
    "policy": ["all_on_gpu", "zero_offload", "patrickstar", "static_partition", "tide"],
}


def profile() -> None:
    groups = [g for g in load_grid(GRID).groups() if dict(g.values)["batch"] == 8]
    profiler = cProfile.Profile()
    profiler.enable()
    for group in groups:
        evaluate(group)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", action="store_true")
    if parser.parse_args().profile:
        profile()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        result = ps.sweep(GRID, Path(folder) / "results.parquet")
        cold_s = time.perf_counter() - start_s
        get_reusable_executor().shutdown(wait=True)
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu_s = sum(u.ru_utime + u.ru_stime for u in usages)
        start_s = time.perf_counter()
        ps.sweep(GRID, Path(folder) / "results.parquet")
        warm_s = time.perf_counter() - start_s
    points = len(result.rows)
    fitting = sum(row["fits"] is True for row in result.rows)
    print(
        f"{points} points ({fitting} fit): {cold_s:.1f} s cold, {points / cold_s:.0f} points/s (limit {LIMIT_S:g} s), "
        f"{cpu_s:.1f} s of CPU time; {warm_s:.2f} s from the cache"
    )
    figures = {
        "points": points,
        "fitting": fitting,
        "cold_s": cold_s,
        "cpu_s": cpu_s,
        "points_per_s": points / cold_s,
        "warm_s": warm_s,
    }
    print(write_result("sweep", figures))
    return 0 if cold_s < LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
