"""`python -m pstar_sim ...` is `pstar ...`. torchrun starts `python -m executor ...`, which uses it too."""

from __future__ import annotations

import sys

from pstar_sim.cli import main


def run_ranks() -> int:
    """The exit status of one of several ranks."""
    from pstar_sim.cli.torchrun import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
