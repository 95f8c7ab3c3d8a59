"""The layer-major order beside depth-first at a throttled link: a GPT-2 of 8 layers in 8 micro-batches on the virtual
accelerator, under plans of `tide`, `tide:order=relay`, `tide:order=relay-host` and `l2l` for one GPU, which run in
turns (_in_turns.py).

Prints measured beside simulated seconds, the bytes that were copied to the accelerator and back, and the speed of each
plan relative to `tide`; writes results/relay.json. Losses have to be equal.
"""

from __future__ import annotations

from _help import only_help
from _in_turns import Contest
from _results import write_result

CONTEST = Contest(
    policies=("tide", "tide:order=relay", "tide:order=relay-host", "l2l"), bandwidth_bytes_per_s=0.1e9, room_share=0.5
)

if __name__ == "__main__":
    only_help(__doc__)
    write_result("relay", CONTEST.run())
