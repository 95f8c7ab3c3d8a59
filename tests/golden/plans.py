"""The small jobs whose plans are kept as text, and how the text is made. Used by test_golden.py and update.py."""

from __future__ import annotations

from pathlib import Path

from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.policy import find_policy
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.units import MIB

HERE = Path(__file__).parent
TIDE = [0, 1, 2, 2, 1, 0, 0]  # MiB of non-model data: F0 F1 F2 B2 B1 B0 step

# file: policy, micro-batches, MiB of GPU memory, update, clip
JOBS = {
    "zero_offload": ("zero_offload", 1, 14, "step", True),
    "patrickstar": ("patrickstar", 1, 10, "step", True),
    "static_partition": ("static_partition", 1, 6, "eager", False),
    "tide_eager": ("tide", 1, 6, "eager", False),
    "tide_clip_two_micro_batches": ("tide", 2, 8, "step", True),
    "optimal_eager": ("optimal", 1, 18, "eager", False),
}
LINKS = {"optimal_eager": 4}  # MiB/s where it is not 1: fast enough for states to be streamed


def machine(gpu_bytes: int, link_mib_per_s: int = 1) -> Machine:
    """A working list (2 MiB) crosses the link in 2 s (on a faster link in less), Adam takes 1 s a chunk."""
    return round_machine(
        gpu_memory_bytes=gpu_bytes,
        h2d_bytes_per_s=link_mib_per_s * MIB,
        flops_per_s={"bf16": 1e12},
    )


def plan(name: str) -> Plan:
    """Three layers of 2**20 parameters; forward 1 s, backward 2 s each."""
    policy, micro_batches, gpu_mib, update, clip = JOBS[name]
    workload = chain_workload(3, MIB, forward_s=1.0, tide_bytes=[n * MIB for n in TIDE], micro_batches=micro_batches)
    settings = Settings(update=update, clip=clip, chunk_bytes=2 * MIB)
    return find_policy(policy)(workload, machine(gpu_mib * MIB, LINKS.get(name, 1)), settings)


def text(name: str) -> str:
    """What the file holds: the job, who lives where between two iterations, the steps."""
    policy, micro_batches, gpu_mib, update, clip = JOBS[name]
    made = plan(name)
    lines = [
        (
            f"# {policy}: 3 layers of 2 MiB, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, "
            f"GPU of {gpu_mib} MiB, update {update}, {'clipping' if clip else 'no clipping'}"
        ),
        f"# modes: {' '.join(made.modes)}",
    ]
    for place in ("gpu", "host"):
        held = sorted((r.chunk, r.list) for r in made.initial if r.place == place)
        lines.append(f"# {place}: {' '.join(f'{c}.{which}' for c, which in held) or 'nothing'}")
    return "\n".join(lines) + "\n" + made.to_text()
