"""What LoRA beside a 4-bit base takes on cards of 12 and 24 GB with 64 GB of host memory: whether it fits, under which
policy it is fastest, its seconds, and from how many tokens on copies of layers hide.

    python benchmarks/qlora.py        # writes benchmarks/results/qlora.json
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _help import only_help
from _results import write_result

import pstar_sim as ps
from pstar_sim.workload.presets import preset

MACHINE, HOST = "rtx4090-128gb", "64GB"
CARDS = (12, 24)  # GB
JOBS = (
    ("qwen3-8b", "nf4"),
    ("llama-3.1-8b", "nf4"),
    ("llama-3.1-70b", "nf4"),
    ("qwen3-30b-a3b", "nf4"),
    ("qwen3-30b-a3b", "nf4-experts"),
)
SEQUENCES = (512, 2048, 8192, 32768)
LOADING = "in-place"  # 70 B in 4 bits and their copy while they are loaded are more than 64 GB


def rows() -> Iterator[dict[str, Any]]:
    for model, base in JOBS:
        for card in CARDS:
            machine = ps.machine(MACHINE, gpu_memory=f"{card}GB", host_memory=HOST)
            for sequence in SEQUENCES:
                w = preset(model, batch=1, seq=sequence, lora="r=16", base=base, loss="chunked")
                answer = ps.fits(w, machine, loading=LOADING, near=False)
                best = answer.fastest[0] if answer.any else None
                hiding = answer.hiding
                assert hiding is not None
                row = {
                    "model": model,
                    "base": base,
                    "card_gb": card,
                    "sequence": sequence,
                    "policy": best and best.policy,
                    "iteration_s": best and best.iteration_s,
                    "gpu_needed_bytes": best and best.gpu_needed_bytes,
                    "host_needed_bytes": best and best.host_needed_bytes,
                    "from_tokens": hiding.from_tokens,
                    "layers_bytes": hiding.layers_bytes,
                }
                print(row, flush=True)
                yield row


def main() -> None:
    only_help(__doc__)
    found = list(rows())
    write_result("qlora", {"machine": MACHINE, "host": HOST, "loading": LOADING, "rows": found})


if __name__ == "__main__":
    main()
