"""Gradients that add up on the GPU beside gradients that add up on the host, in small: one GPT-2 of 8 layers in 8
micro-batches on the virtual accelerator, whose GPU has room for the parameters and the sums of gradients, not for the
states (8B on an 80 GB GPU has about as much), under plans that run in turns (_in_turns.py).

Prints measured beside simulated seconds and the lower bound, the bytes that were copied to the accelerator and back,
and how many times faster than `tide:streams=on` each is; writes results/sums.json. Losses have to be equal.
"""

from __future__ import annotations

from _help import only_help
from _in_turns import Contest
from _results import write_result

CONTEST = Contest(
    policies=("tide:streams=on", "tide:streams=on,sums=on", "optimal:sums=off", "optimal"),
    bandwidth_bytes_per_s=0.015e9,
    room_share=2.2,
)

if __name__ == "__main__":
    only_help(__doc__)
    write_result("sums", CONTEST.run())
