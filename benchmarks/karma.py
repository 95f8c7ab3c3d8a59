"""KARMA beside all blocks recomputed and all blocks swapped: three jobs simulated, two measured on the virtual
accelerator, where the three plans run in turns.

All three plans are by policy `karma`, so that only the choice per block differs; update eager, no clipping. "All
swapped" leaves out the first block and the last two, which cannot be swapped. Prints a row per job and writes
results/karma.json. Published: 1.52x on average over other out-of-core methods, in six other models (abstract of SC'20;
a listing: 1.22x).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from _results import write_result

import pstar_sim as ps
from executor.measuring.rates import measure_virtual_machine
from executor.run import TrainingJob
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.planner.variants import Chosen, choose
from pstar_sim.workload.mixing import block_names, offload_blocks
from pstar_sim.workload.presets import default_dtype
from pstar_sim.workload.workload import Workload, activations_text

SIMULATED = (
    ("bert-large", 32, 512, "v100-16", 1),
    ("vit-l-16", 128, 197, "v100-16", 1),
    ("1B", 40, 1024, "rtx4090", 4),
)
SETTINGS = Settings(update="eager", clip=False)
CONFIG = {"model_type": "gpt2", "n_layer": 8, "n_embd": 128, "n_head": 4, "n_positions": 128, "vocab_size": 512,
          "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
BATCHES, SEQUENCE = (8, 24), 128  # the copies of parameters take longer than compute in the first only
BANDWIDTH_BYTES_PER_S = 0.1e9  # a block's copy takes some five times its forward, as BERT-Large's on a V100
KEPT_SHARE = 0.6  # share of the activations that fit the measured job's GPU
RUNS, STEPS = 3, 3


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [simulated(*job) for job in SIMULATED]
    rows += [measured(batch) for batch in BATCHES]
    write_result("karma", {"rows": rows})


def simulated(model: str, batch: int, sequence: int, name: str, gpus: int) -> dict[str, object]:
    machine = ps.machine(name, gpus=gpus)
    dtype = default_dtype(machine)
    recomputed, kept = (
        ps.preset(model, batch=batch // gpus, seq=sequence, dtype=dtype, checkpointing=c) for c in (True, False)
    )
    chosen = three(recomputed, kept, machine)
    what = f"{model}, batch {batch} x {sequence}, {gpus} x {name}"
    return said(what, chosen, {how: [one.iteration_s] for how, one in chosen.items() if one is not None})


def three(recomputed: Workload, kept: Workload, machine: Machine) -> dict[str, Chosen | None]:
    swapped = offload_blocks(kept, block_names(kept)[1:-2])
    among = {"kept": [kept], "recomputed": [recomputed], "swapped": [swapped], "karma": [recomputed, kept]}
    return {how: _chosen(workloads, machine) for how, workloads in among.items()}


def _chosen(workloads: Sequence[Workload], machine: Machine) -> Chosen | None:
    try:
        return choose(workloads, machine, SETTINGS, policy="karma")
    except DoesNotFit:
        return None


def said(what: str, chosen: Mapping[str, Chosen | None], turns: Mapping[str, Sequence[float]]) -> dict[str, object]:
    """Print the job's row and return it. A gain is the median over the turns, in which a loaded machine delays all ways
    alike.

    turns: seconds per way, simulated once or measured turn by turn.
    """
    karma = chosen["karma"]
    assert karma is not None
    gains = {
        how: statistics.median(other / own for other, own in zip(turns[how], turns["karma"]))
        for how in ("recomputed", "swapped")
    }
    seconds = {how: statistics.median(column) for how, column in turns.items()}
    words = ", ".join(f"{how} {s:.3f} s" for how, s in seconds.items())
    how = activations_text(karma.workload).removeprefix("activations ")
    print(f"{what}: {words}; {gains['recomputed']:.2f}x and {gains['swapped']:.2f}x; karma: {how}", flush=True)
    return {"job": what, "seconds": seconds, "gains": gains, "chosen": how,
            "where": karma.plan.choices["capacity"]}  # fmt: skip


def measured(batch: int) -> dict[str, object]:
    """Returns the measured seconds of each plan, turn by turn, beside the simulated ones."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        job = TrainingJob(
            model=f"hf:{path}", batch=batch, sequence=SEQUENCE, dtype="fp32", checkpointing=False, lr=1e-4, clip=False
        )
        rates = measure_virtual_machine(ps.machine("virtual", gpu_memory="2GB"))
        kept, recomputed = (replace(job, checkpointing=c).record(rates) for c in (False, True))
        peak_bytes = {w.checkpointing: w.peak_non_model_bytes for w in (kept, recomputed)}
        room = peak_bytes[True] + KEPT_SHARE * (peak_bytes[False] - peak_bytes[True])
        states = 16 * kept.params  # parameters in fp32, states
        rank = rates.ranks[0]
        gpu = replace(rank.gpu, usable_bytes=rank.gpu.context_bytes + int(room) + states)
        link = replace(rank.link, h2d_bytes_per_s=BANDWIDTH_BYTES_PER_S, d2h_bytes_per_s=BANDWIDTH_BYTES_PER_S)
        machine = replace(rates, ranks=(replace(rank, gpu=gpu, link=link),))
        chosen = three(recomputed, kept, machine)
        found: dict[str, list[float]] = {how: [] for how, one in chosen.items() if one is not None}
        for _ in range(RUNS):
            for how, column in found.items():
                one = chosen[how]
                assert one is not None
                own = replace(job, checkpointing=one.workload.checkpointing and not one.workload.activations)
                result = own.run(one.plan, steps=STEPS, bandwidth=(BANDWIDTH_BYTES_PER_S, BANDWIDTH_BYTES_PER_S))
                column.append(statistics.median(report.time_s for report in result.reports[1:]))
    predicted = {how: one.iteration_s for how, one in chosen.items() if one is not None}
    print("measured; simulated: " + ", ".join(f"{how} {s:.3f} s" for how, s in predicted.items()))
    row = said(f"GPT-2 of 8 layers, batch {batch} x {SEQUENCE}, virtual accelerator, measured", chosen, found)
    return {**row, "runs": found, "simulated": predicted}


if __name__ == "__main__":
    main()
