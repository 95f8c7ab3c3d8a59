"""CPU seconds of planning and simulating in this process, after the imports.

    python benchmarks/simulate.py      (writes results/simulate.json)

- `compare` with five policies for the 12B preset (batch 8, sequence 1024) on v100-32, with its defaults;
- one 175B iteration (batch 8, sequence 1024, checkpointing) on an h100-80 with 4 TB of host memory: planning by `tide`,
  `play` until it is steady, and `play` for each simulated iteration;
- 15B in 4 micro-batches of 4 on v100-32, the longest plan of the README (about 10,000 steps);
- bare SimPy timeouts, one per played step, for a ratio that does not depend on the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import simpy
from _help import only_help
from _results import write_result

from pstar_sim.bounds.bounds import lower_bound
from pstar_sim.catalog.loader import load_machine, resize
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.timeline import Timeline
from pstar_sim.planner.compare import compare
from pstar_sim.policy.registry import policies
from pstar_sim.sim import play
from pstar_sim.workload.presets import preset
from pstar_sim.workload.workload import Workload

REPEATS = 5
EAGER = Settings(update="eager", clip=False)


def cpu_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Returns the median CPU seconds of a call."""
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def bare_timeouts(count: int) -> None:
    env = simpy.Environment()

    def queue() -> Any:
        for _ in range(count):
            yield env.timeout(1.0)

    env.process(queue())
    env.run()


def one_plan(workload: Workload, machine: Machine) -> dict[str, object]:
    """Returns the figures of planning by tide and playing the plan."""
    plan: Plan = policies()["tide"](workload, machine, EAGER)
    timeline: Timeline = play(plan)
    bound = lower_bound(workload, machine, EAGER, plan.layout)
    play_s = cpu_s(lambda: play(plan))
    played = len(plan.steps) * timeline.iterations
    return {
        "steps": len(plan.steps),
        "chunks": len(plan.layout.chunks),
        "moments": len(workload.moments),
        "iterations_played": timeline.iterations,
        "iteration_s": timeline.iteration_s,
        "over_bound": timeline.iteration_s / bound.seconds - 1,
        "plan_cpu_s": cpu_s(lambda: policies()["tide"](workload, machine, EAGER), 3),
        "bound_cpu_s": cpu_s(lambda: lower_bound(workload, machine, EAGER, plan.layout)),
        "play_cpu_s": play_s,
        "play_cpu_s_per_iteration": play_s / timeline.iterations,
        "play_over_bare_timeouts": play_s / cpu_s(lambda: bare_timeouts(played)),
    }


def main() -> None:
    v100, h100 = load_machine("v100-32"), resize(load_machine("h100-80"), host_memory="4TB")
    twelve = preset("12B", batch=8, seq=1024)
    result = {
        "compare_12B_five_policies": {
            "policies": sorted(policies()),
            "cpu_s": cpu_s(lambda: compare(twelve, v100), 3),
            "limit_cpu_s": 2.0,
        },
        "175B": {**one_plan(preset("175B", batch=8, seq=1024), h100), "limit_play_cpu_s_per_iteration": 1.0},
        "15B_4x4": one_plan(preset("15B", batch=4, seq=1024, micro_batches=4), v100),
    }
    print(json.dumps(result, indent=2))
    print(write_result("simulate", result))


if __name__ == "__main__":
    only_help(__doc__)
    main()
