"""Users' scripts (tests/executor/scripts), offloaded by one line at budgets at which chunks leave the GPU.

Each script runs three times: offloaded; with the reference in plain torch (fp32 masters, see
tests/executor/script_runs.py), to which the offloaded run has to be equal to the bit; and unchanged, with its own
autocast, from which the offloaded run may differ by the two bounds below.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

LOSS = 0.01
"""Largest distance, relative, of a step's loss from that of the script's own autocast run. Fixed before the first run:
bf16 rounds by 2**-9, a forward has some thirty roundings one after the other, and a loss is a mean over many tokens."""
PATH = 0.5
"""Largest distance of the parameters from those of the script's own autocast run, as a share of the way that the run
has come from its initial values. Fixed before the first run: AdamW divides each gradient by its own size, so the whole
update of an element differs where rounding turns the sign of a small gradient. If this happens to 3 % of all elements,
the distance is sqrt(0.03 * 4) = 0.35 of the way. Weights are compared as the runs have them, ours in 16 bits. In a run
of two or three steps the rounding alone is as large as the way."""
MEMORY = {
    "trainer_bf16": "1.3MB",
    "trl_sft": "7.4MB",
    "trl_dpo_lora": "7MB",
    "plain_loop": "950KB",
    "lightning_module": "1MB",
}
"""GPU memory of each script: its activations take most of it, and its chunks do not fit beside them."""


def measure(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Returns the figures of the three runs of a script."""
    import script_runs as scripts

    count = ("--steps", str(steps))
    ours = scripts.offloaded(name, folder, MEMORY[name], *count)
    reference = scripts.written_out(name, folder, *count)
    own = scripts.own(name, folder, *count)
    assert ours.plan is not None and ours.session is not None
    w, links = ours.plan.workload, ours.session.status().links
    return {
        "script": name, "steps": steps, "params": w.params, "dtype": w.dtype, "gpu_memory": MEMORY[name],
        "policy": ours.plan.policy, "chunks": len(ours.plan.layout.chunks), "micro_batches": w.micro_batches,
        "h2d_bytes_per_step": links["h2d"].moved_bytes, "d2h_bytes_per_step": links["d2h"].moved_bytes,
        "off_plan": ours.session.deviations,
        "equal_to_the_bit": scripts.equal_to_the_bit(ours, reference),
        "loss_distance": scripts.loss_distance(ours, own), "loss_bound": LOSS,
        "path_distance": scripts.path_distance(ours, own, reference.initial), "path_bound": PATH,
        "losses": ours.losses, "own_losses": own.losses,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each run (default: 10)")
    parser.add_argument("--out", type=Path, help="folder of scripts.json (default: benchmarks/results)")
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root / "tests" / "executor"), str(root / "benchmarks")]
    from _results import write_result

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in MEMORY:
            rows.append(row := measure(name, Path(folder), options.steps))
            print(
                f"{name}: {row['params'] / 1e3:.0f} k parameters in {row['gpu_memory']}; per step "
                f"{row['h2d_bytes_per_step'] / 1e3:,.0f} kB to the GPU, {row['d2h_bytes_per_step'] / 1e3:,.0f} kB to "
                f"the host; equal to the bit: {row['equal_to_the_bit']}; from its own autocast run: losses "
                f"{row['loss_distance']:.1e} (bound {LOSS}), parameters {row['path_distance']:.2f} of the way "
                f"(bound {PATH})",
                flush=True,
            )
    print(write_result("scripts", {"rows": rows}, folder=options.out))
    good = all(
        row["equal_to_the_bit"] and row["loss_distance"] <= LOSS and row["path_distance"] <= PATH and
        row["h2d_bytes_per_step"] > 0
        for row in rows
    )  # fmt: skip
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
