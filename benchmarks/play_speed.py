"""CPU seconds of `play`, this checkout beside another one, interleaved: the ratio of the medians.

    git worktree add ../before COMMIT
    python benchmarks/play_speed.py ../before [--rounds 15]      (writes results/play_speed.json)

One process for each checkout plans the same jobs. Then they play in turns, so that other load on the machine affects
both alike. It also gives the seconds of `play` together with reading every span and sample. Fails if `play` takes more
than LIMIT of the other's time, or if the two give different results.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMIT = 0.5
HERE = Path(__file__).resolve().parents[1]
JOBS = {
    "18B, v100-32": ("18B", "v100-32", {"batch": 8}),
    "15B in 4 micro-batches, v100-32": ("15B", "v100-32", {"batch": 4, "micro_batches": 4}),
    "175B, h100-80 with 4 TB": ("175B", "h100-80", {"batch": 8}),
    "12B, a100-80x8": ("12B", "a100-80x8", {"batch": 4}),
}


def serve() -> None:
    """Run the worker: a line {"job", "rows"} in, a line {"cpu_s", ...} out."""
    from pstar_sim.catalog.loader import load_machine, resize
    from pstar_sim.core.plan import Settings
    from pstar_sim.policy.registry import policies
    from pstar_sim.sim import play
    from pstar_sim.workload.presets import preset

    plans = {}
    for name, (model, machine, shape) in JOBS.items():
        found = load_machine(machine)
        found = resize(found, host_memory="4TB") if model == "175B" else found
        plans[name] = policies()["tide"](preset(model, seq=1024, **shape), found, Settings(update="eager", clip=False))
    for line in sys.stdin:
        asked = json.loads(line)
        plan = plans[asked["job"]]
        begin_s = time.process_time()
        timeline = play(plan)
        if asked["rows"]:
            assert timeline.spans and timeline.samples
        cpu_s = time.process_time() - begin_s
        said = {"iteration_s": timeline.iteration_s, "peak_bytes": timeline.peak_bytes}
        print(json.dumps({"cpu_s": cpu_s, "steps": len(plan.steps), "said": said}), flush=True)
        del timeline  # otherwise the next time would include freeing these rows
        gc.collect()


class Worker:
    def __init__(self, checkout: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"},
        )

    def play(self, job: str, *, rows: bool) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, "rows": rows}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="another checkout of this repository")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return 0
    if args.before is None:
        parser.error("the other checkout is needed")
    from _load import Others
    from _results import write_result

    commit = subprocess.run(
        ["git", "-C", str(args.before), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    workers = {"before": Worker(args.before.resolve()), "now": Worker(HERE)}
    figures: dict[str, object] = {}
    failed = False
    try:
        for worker in workers.values():
            worker.play(next(iter(JOBS)), rows=False)  # imports and plans
        others = Others()
        for job in JOBS:
            took: dict[tuple[str, bool], list[float]] = {(name, rows): [] for name in workers for rows in (False, True)}
            said: dict[str, Any] = {}
            for n in range(args.rounds):
                for rows in (False, True):
                    for name in sorted(workers, reverse=bool(n % 2)):
                        answer = workers[name].play(job, rows=rows)
                        took[name, rows].append(answer["cpu_s"])
                        said[name] = answer["said"]
            medians = {key: statistics.median(values) for key, values in took.items()}
            ratio = medians["now", False] / medians["before", False]
            same = said["before"]["peak_bytes"] == said["now"]["peak_bytes"] and (
                abs(said["before"]["iteration_s"] / said["now"]["iteration_s"] - 1) < 1e-9
            )
            failed = failed or ratio > LIMIT or not same
            figures[job] = {
                "steps": answer["steps"],
                "before_cpu_s": medians["before", False],
                "now_cpu_s": medians["now", False],
                "ratio": ratio,
                "ratio_with_every_row": medians["now", True] / medians["before", True],
                "same_result": same,
                "cores_of_others": max(0.0, others.cores() - 1),  # less the worker that plays
            }
            print(f"{job}: {json.dumps(figures[job])}", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    result = {"before_commit": commit, "rounds": args.rounds, "limit_ratio": LIMIT, "jobs": figures}
    print(write_result("play_speed", result))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
