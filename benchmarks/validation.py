"""The errors of `pstar validate`, kept for the documentation: the first part of its output, up to the list of misses;
the tested rows that are farthest off, by machine, system and figure; and the phases of ZeRO-3 with offloading on
several GPUs, whose backward pass waits for its collectives, where they are published. `forward_waits` has the rows of
its forward pass, replayed as if the forward pass waited for its gathers too.

    python benchmarks/validation.py      # two minutes; writes benchmarks/results/validation.json
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from _help import only_help
from _results import write_result

from pstar_sim.catalog.efficiency import fitted
from pstar_sim.policy.kit.options import split_spec
from pstar_sim.report.validation import validation_text
from pstar_sim.validation.experiments import experiment_of, runs_of
from pstar_sim.validation.replay import replay, row_value
from pstar_sim.validation.results import Result, validate
from pstar_sim.validation.rows import published_rows

FAR = 0.2
OFFLOADING = ("zero3_offload", "deep_optimizer_states")


def collectives(results: Iterable[Result]) -> list[dict[str, object]]:
    """Returns, for each machine and number of nodes, the errors of forward, backward and iterations of ZeRO-3 with
    offloading on several GPUs: the median, and the smallest and largest."""
    rows = [r for r in results if r.gpus > 1 and split_spec(r.policy)[0] in OFFLOADING and r.metric.endswith("_ms")]
    waits = forward_waits({(r.file, r.line) for r in rows if r.metric == "fwd_ms"})
    found = []
    for hardware, nodes in sorted({(r.hardware, r.nodes) for r in rows}):
        mine = [r for r in rows if (r.hardware, r.nodes) == (hardware, nodes)]
        phases = {name: [r.error for r in mine if r.metric == f"{name}_ms"] for name in ("fwd", "bwd", "iter")}
        phases["forward_waits"] = [waits[r.file, r.line] for r in mine if r.metric == "fwd_ms"]
        found.append({"hardware": hardware, "nodes": nodes} | {name: spread(v) for name, v in phases.items()})
    return found


def spread(errors: Sequence[float]) -> dict[str, object]:
    """Returns the number of errors, their median, and the smallest and the largest."""
    median = statistics.median(errors)
    return {
        "rows": len(errors), "median": round(median, 3), "least": round(min(errors), 3), "most": round(max(errors), 3),
    }  # fmt: skip


def forward_waits(places: Set[tuple[str, int]]) -> dict[tuple[str, int], float]:
    """Returns the errors of these rows (file, line) as if the forward pass waited for its gathers."""
    found = {}
    for run in runs_of(r for r in published_rows() if (r.file, r.line) in places):
        experiment = experiment_of(run, fitted())
        outcome = replay(replace(experiment, policy=f"{experiment.policy},prefetch=0"))
        for row in run:
            value = row_value(row, outcome)
            assert value is not None, f"{row.where}: {outcome.reason}"
            found[row.file, row.line] = value / row.value - 1
    return found


def farthest(results: Iterable[Result]) -> list[dict[str, object]]:
    """Returns the tested rows beyond FAR, those of one machine, system (without its options) and figure together; too
    low and too high apart."""
    groups: dict[tuple[str, str, str, bool], list[Result]] = {}
    for r in results:
        if r.use == "tested" and abs(r.error) > FAR:
            system = re.sub(r" (gap|ratio)\S+", "", r.system)
            groups.setdefault((r.hardware, system, r.metric, r.error > 0), []).append(r)
    ordered = sorted(groups.items(), key=lambda item: -max(abs(r.error) for r in item[1]))
    return [
        {"hardware": k[0], "system": k[1], "figure": k[2], **spread([r.error for r in rows])} for k, rows in ordered
    ]


def main() -> int:
    found = validate()
    summary = validation_text(found, width=120).partition("\n\nTested rows off")[0]
    print(summary)
    figures = {
        "summary": [line.rstrip() for line in summary.splitlines()],
        "farther_than": FAR,
        "farthest": farthest(found.results),
        "collectives": collectives(found.results),
    }
    print(write_result("validation", figures))
    return 0


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
