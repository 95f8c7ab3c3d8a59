"""Gradients that add up on the GPU beside gradients that add up on the host, in small: a GPT-2 of 8 layers in 8
micro-batches on the virtual accelerator. Its GPU has room for the parameters and the sums of gradients, not for the
states (as an 80 GB GPU has for 8B). The plans run in turns (_in_turns.py).

Prints measured beside simulated seconds and the lower bound, the bytes that were copied to the accelerator and back,
and the speed of each plan relative to `tide:streams=on`; writes results/sums.json. Losses have to be equal.
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
