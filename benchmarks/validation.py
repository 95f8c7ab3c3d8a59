"""The errors of `pstar validate`, kept for the README: the first part of its output, up to the list of misses."""

from __future__ import annotations

import contextlib
import io
import sys

from _help import only_help
from _results import write_result

from pstar_sim.cli import main as pstar


def main() -> int:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = pstar(["validate"])
    summary = out.getvalue().partition("\n\nTested rows off")[0]
    print(summary)
    print(write_result("validation", {"summary": [line.rstrip() for line in summary.splitlines()]}))
    return status


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
