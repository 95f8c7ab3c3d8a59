"""`torchrun --nproc-per-node N -m executor ...`: an entry to the command line, like `python -m pstar_sim`."""

import sys

from pstar_sim.__main__ import run_ranks

if __name__ == "__main__":
    sys.exit(run_ranks())
