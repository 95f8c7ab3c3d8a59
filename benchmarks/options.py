"""`optimal` against every shipped policy at every point of a grid of options.

The grid has each policy as it is, and with each other value of each of its options alone. If the policy may stream
states, the grid has each of these with streams=on, too. The values of a numeric option are NUMBERS, or half and twice a
large default. The jobs have small and large batches, one and several micro-batches, eager and behind the barrier, on
one GPU with the constants of machines/, in orders that a loop of the user's own can follow.

Prints the points that are faster than `optimal` by more than 0.01 %; writes results/options.json with a row per point.
Exit 1 if a policy without options is faster.

--drawn N: instead, N small random jobs (tests/helpers/bounded.py) on one GPU, on several alike and on GPUs that differ,
some with sums in 16 bits, each under POINTS random policies and options. Prints the points that are faster than
`optimal` by more than 0.1 %; writes results/options_drawn.json. Exit 1 if one is.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from _results import write_result
from bounded import random_job, random_spec, several

import pstar_sim as ps
from pstar_sim.core.plan import SUMS, Plan, Settings
from pstar_sim.errors import PstarError
from pstar_sim.policy.kit.options import options_of, show
from pstar_sim.policy.kit.ties import AS_FAST
from pstar_sim.policy.registry import built_in, can_follow, find_policy
from pstar_sim.sim.play import play

FROZEN = Path(__file__).with_name("machines")
EAGER, BARRIER = Settings(update="eager", clip=False), Settings(update="step", clip=True)
SETTINGS = {"eager": EAGER, "barrier": BARRIER}
NUMBERS, LARGE = (1, 4), 100
POINTS, SLOWER, GPUS = 6, 1e-3, (1, 1, 2, 4, 8)  # of a drawn job
JOBS = (  # model, machine, memory of the GPU (None: all), batch, micro-batches, setting
    ("12B", "h100-80", None, 8, 1, "eager"),
    ("1B", "rtx4090", "6GB", 4, 1, "barrier"),
    ("1B", "rtx4090", "6GB", 1, 4, "eager"),
    ("llama-3-8b", "h100-80", None, 2, 1, "eager"),
    ("4B", "rtx4090", None, 2, 4, "barrier"),
)


def values(kind: Any, default: object) -> Iterator[str]:
    """Yields the values that the grid has for an option's type, as written in a spec."""
    if kind is bool:
        yield from ("on", "off")
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    elif get_origin(kind) is Union:
        for one in get_args(kind):
            yield from values(one, default)
    elif get_args(kind)[:1] == (int,):
        large = isinstance(default, int) and default >= LARGE
        yield from map(str, (default // 2, default * 2) if large and isinstance(default, int) else NUMBERS)
    else:
        yield "0.5"


def points() -> Iterator[str]:
    """Yields the specs of the grid, without `optimal` itself."""
    for name, policy in built_in().items():
        options = options_of(policy)
        alone = [
            f"{key}={value}"
            for key, option in options.items()
            for value in values(option.kind, option.default)
            if value != show(option.default)
        ]
        streams = [
            f"streams=on,{one}" for one in alone if "streams=on" in alone and not one.startswith(("streams", "barrier"))
        ]
        if name != "optimal":
            yield name
        yield from (f"{name}:{one}" for one in (*alone, *streams))


def drawn_job(number: int) -> tuple[str, float | None, dict[str, float]]:
    """Returns the kind of the job's machine, seconds of `optimal` (None: no plan) and those of the points that fit."""
    rng = random.Random(f"options {number}")
    w, machine, settings = random_job(rng)
    if w.dtype == "bf16":
        settings = replace(settings, sums=rng.choice(SUMS))
    gpus = rng.choice(GPUS)
    machine = machine if gpus == 1 else several(rng, machine, gpus)
    kind = "GPUs that differ" if machine.mixed else f"{gpus} GPUs" if gpus > 1 else "one GPU"

    def seconds_of(spec: str) -> float | None:
        try:
            plan: Plan = find_policy(spec)(w, machine, settings)
        except PstarError:  # the policy does not fit, or does not apply
            return None
        return play(plan).iteration_s

    specs: list[str] = []
    while len(specs) < POINTS:
        spec = random_spec(rng)
        if not spec.startswith("optimal") and spec not in specs and can_follow(settings, w, spec):
            specs.append(spec)
    found = {spec: seconds_of(spec) for spec in specs}
    return kind, seconds_of("optimal"), {spec: seconds for spec, seconds in found.items() if seconds is not None}


def drawn(count: int, processes: int) -> int:
    kinds: Counter[str] = Counter()
    faster: list[dict[str, object]] = []
    points, most = 0, float("-inf")
    with ProcessPoolExecutor(processes) as pool:
        for number, (kind, best_s, found) in enumerate(pool.map(drawn_job, range(count))):
            kinds[kind if best_s is not None else "no plan of optimal"] += 1
            points += len(found)
            for spec, seconds in found.items():
                by = float("inf") if best_s is None else best_s / seconds - 1
                most = max(most, by)
                if by > SLOWER:
                    faster.append({"job": number, "kind": kind, "policy": spec, "iteration_s": seconds, "faster": by})
                    print(f"job {number}, {kind}: {spec} is {by:.2%} faster than optimal ({best_s} s)", flush=True)
            if number % 50 == 49:
                print(f"{number + 1} jobs, {points} points", flush=True)
    figures = {"jobs": count, "kinds": dict(sorted(kinds.items())), "points": points, "most": most, "faster": faster}
    print(f"{figures}\nwritten: {write_result('options_drawn', figures)}")
    return 1 if faster else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="number of jobs, from the first")
    parser.add_argument("--drawn", type=int, metavar="N", help="random jobs instead")
    parser.add_argument("--processes", type=int, default=2, help="of --drawn")
    args = parser.parse_args()
    if args.drawn is not None:
        return drawn(args.drawn, args.processes)
    rows: list[dict[str, object]] = []
    beaten = 0
    for model, name, memory, batch, micro_batches, word in JOBS[: args.jobs]:
        machine = ps.machine(FROZEN / f"{name}.toml", gpu_memory=memory)
        workload = ps.preset(model, batch=batch, seq=1024, dtype="bf16", micro_batches=micro_batches)
        job, settings = f"{model}, {name}, {memory}, {batch} x {micro_batches}, {word}", SETTINGS[word]
        best_s = play(find_policy("optimal")(workload, machine, settings)).iteration_s
        count = 0
        for spec in points():
            if not can_follow(settings, workload, spec):
                continue
            try:
                seconds = play(find_policy(spec)(workload, machine, settings)).iteration_s
            except PstarError:  # the policy does not fit, or does not apply
                continue
            count += 1
            faster = best_s / seconds - 1
            rows.append({"job": job, "policy": spec, "iteration_s": seconds, "faster": faster})
            if faster > AS_FAST:
                beaten += ":" not in spec
                print(
                    f"{job}: {spec} is {faster:.2%} faster than optimal ({seconds:.4f} s, {best_s:.4f} s)", flush=True
                )
        print(f"{job}: optimal {best_s:.4f} s, {count} points fit", flush=True)
        rows.append({"job": job, "policy": "optimal", "iteration_s": best_s, "faster": 0.0})
    print(f"{beaten} policies without options are faster; written to {write_result('options', {'rows': rows})}")
    return 1 if beaten else 0


if __name__ == "__main__":
    sys.exit(main())
