"""The lower bounds against exact optima of tiny instances of four kinds: two unequal GPUs, routed experts, sums of
gradients in 16 bits, layer-major order.

    python benchmarks/bounds_kinds.py [--tiny 80] [--seed 0]

Draws instances of each kind until so many have an optimum (tests/helpers/exact_optimum.py): bounds <= optimum, and on
one GPU optimum <= every policy's plan. Collectives take no time. Prints how far optima and plans are above; writes
results/bounds_kinds.json. Exit status 1 if a bound is above an optimum or a plan below it.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from _results import write_result
from bounded import SPECS
from bounds import NOTHING, TOO_MANY, spread
from exact_optimum import Tiny
from tiny import BY_ROUNDING, compare_tiny, layer_major, optima_of, random_tiny, sums_in_16_bits, to_text, with_experts
from unequal import bounds_of_two, exact_of_two

MOST_STATES = 20_000


@dataclass
class Figures:
    """Of one kind: ratios of optima to bounds and of `optimal` to optima, counts, contradictions."""

    over_joint: list[float] = field(default_factory=list)
    over_fluid: list[float] = field(default_factory=list)
    optimal: list[float] = field(default_factory=list)
    plans: int = 0
    left_out: dict[str, int] = field(default_factory=lambda: {TOO_MANY: 0, NOTHING: 0})
    wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "instances": len(self.over_fluid),
            "optimum over joint program": spread(self.over_joint),
            "optimum over fluid program": spread(self.over_fluid),
            "plans": self.plans,
            "optimal over optimum": spread(self.optimal),
            **self.left_out,
            "wrong": self.wrong,
        }


def unequal(rng: random.Random, figures: Figures) -> None:
    t = random_tiny(rng, micro_batches=rng.choice((1, 1, 2)))
    speed, batch = rng.choice((2, 3)), rng.randint(2, 4)
    exact = exact_of_two(t, speed, batch, most_states=MOST_STATES)
    bounds = bounds_of_two(t, speed, batch)
    if exact is None or None in bounds:
        figures.left_out[NOTHING] += 1
        return
    for bound, ratios in zip(bounds, (figures.over_joint, figures.over_fluid)):
        assert bound is not None
        ratios.append(float(exact) / bound)
        if bound > float(exact) * (1 + BY_ROUNDING):
            figures.wrong.append(f"bound {bound} > {exact}: speeds 1 and {speed}, batch {batch}: {to_text(t)}")


def on_one_gpu(changed: Callable[[Tiny, random.Random], Tiny], sums: str = "32-bit") -> Callable[..., None]:
    def compared(rng: random.Random, figures: Figures) -> None:
        t = changed(random_tiny(rng), rng)
        optima = optima_of(t, most_states=MOST_STATES)
        if optima[0] is None:
            figures.left_out[NOTHING] += 1
            return
        row = compare_tiny(t, optima, SPECS, sums=sums)
        best = float(optima[0])
        figures.over_joint.append(best / row.joint)
        figures.over_fluid.append(best / row.fluid)
        figures.plans += len(row.plans)
        if "optimal" in row.plans:
            figures.optimal.append(row.plans["optimal"] / best)
        figures.wrong += [f"{line}: {to_text(t)}" for line in row.wrong]

    return compared


KINDS = {
    "unequal GPUs": unequal,
    "routed experts": on_one_gpu(with_experts),
    "sums in 16 bits": on_one_gpu(lambda t, _: sums_in_16_bits(t), "16-bit"),
    "layer-major": on_one_gpu(lambda t, _: layer_major(t)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", type=int, default=80, help="instances of each kind that have an optimum")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    kinds: dict[str, dict[str, Any]] = {}
    for kind, compared in KINDS.items():
        figures = Figures()
        for number in count():
            if len(figures.over_fluid) == args.tiny:
                break
            try:
                compared(random.Random(f"{kind} {args.seed} {number}"), figures)
            except MemoryError:
                figures.left_out[TOO_MANY] += 1
        kinds[kind] = figures.as_json()
        for key, value in kinds[kind].items():
            print(f"{kind}: {key}: {value}", flush=True)
    print(f"written: {write_result('bounds_kinds', {'seed': args.seed, 'kinds': kinds})}")
    return 1 if any(found["wrong"] for found in kinds.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
