"""The end of the output of `pstar demo`, kept for the README: losses beside plain PyTorch, predicted beside
measured."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile

from _help import only_help
from _results import write_result

from pstar_sim.cli import main as pstar


def main() -> int:
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        status = pstar(["demo", "--out", folder])
    if status:
        return status
    _, _, end = out.getvalue().partition("\n4. Run the plan")
    lines = [line.rstrip() for line in end.splitlines()[1:] if not line.startswith("in /")]
    print("\n".join(lines))
    print(write_result("demo", {"lines": lines}))
    return 0


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
