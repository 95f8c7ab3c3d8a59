"""Two processes of `python -m executor ARGUMENTS`, as torchrun starts them, without torchrun, which ends the other
process where one ends with an error, whatever that has still to say. Started by test_torchrun.py:
`python ranks_of_a_line.py FOLDER`.

FOLDER/runs.json has runs, one after the other: {"name", "arguments", "port", "stop"}. Once the file `stop` has a line,
the second process gets SIGTERM. What they say goes to FOLDER/NAME.RANK.txt, their statuses to FOLDER/NAME.json.
Everything is imported once and then forked.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  # torch's optimizers import it when the first is made
import transformers

import executor.run  # noqa: F401  # what the command imports later
from pstar_sim.__main__ import run_ranks

LIMIT_S = 400.0
RANKS = 2


def begin(run: dict[str, Any], rank: int, folder: Path) -> int:
    """Returns the id of a process; in that process, ends as the command does."""
    child = os.fork()
    if child:
        return child
    out = os.open(folder / f"{run['name']}.{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(out, 2)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run["port"]),
    }  # fmt: skip
    sys.argv = ["executor", *run["arguments"]]
    sys.exit(run_ranks())


def statuses(run: dict[str, Any], folder: Path) -> list[int]:
    children = [begin(run, rank, folder) for rank in range(RANKS)]
    if "stop" in run:
        stop, until_s = Path(run["stop"]), time.monotonic() + LIMIT_S
        while not (stop.is_file() and stop.read_text()) and time.monotonic() < until_s:
            time.sleep(0.1)
        os.kill(children[1], signal.SIGTERM)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    folder = Path(sys.argv[1])
    transformers.GPT2LMHeadModel  # noqa: B018  # imports its module
    gc.freeze()  # what was imported: no process goes through it when it ends
    for run in json.loads((folder / "runs.json").read_text()):
        (folder / f"{run['name']}.json").write_text(json.dumps(statuses(run, folder)))


if __name__ == "__main__":
    main()
