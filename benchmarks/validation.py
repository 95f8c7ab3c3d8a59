"""The errors of `pstar validate`, kept for the documentation: the first part of its output, up to the list of misses;
the tested rows that are farthest off, by machine, system and figure; and the iterations on two nodes of Polaris."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from _help import only_help
from _results import write_result

from pstar_sim.report.validation import validation_text
from pstar_sim.validation.results import Result, validate

FAR = 0.2


def spread(rows: Iterable[Result]) -> dict[str, object]:
    """Returns the number of rows, and their smallest and largest error."""
    errors = sorted(r.error for r in rows)
    return {"rows": len(errors), "least": round(errors[0], 3), "most": round(errors[-1], 3)}


def farthest(results: Iterable[Result]) -> list[dict[str, object]]:
    """Returns the tested rows beyond FAR, those of one machine, system (without its options) and figure together; too
    low and too high apart."""
    groups: dict[tuple[str, str, str, bool], list[Result]] = {}
    for r in results:
        if r.use == "tested" and abs(r.error) > FAR:
            system = re.sub(r" (gap|ratio)\S+", "", r.system)
            groups.setdefault((r.hardware, system, r.metric, r.error > 0), []).append(r)
    ordered = sorted(groups.items(), key=lambda item: -max(abs(r.error) for r in item[1]))
    return [{"hardware": k[0], "system": k[1], "figure": k[2], **spread(rows)} for k, rows in ordered]


def main() -> int:
    found = validate()
    summary = validation_text(found, width=120).partition("\n\nTested rows off")[0]
    print(summary)
    nodes = [r for r in found.results if r.hardware.startswith("Polaris") and r.nodes > 1 and r.metric == "iter_ms"]
    figures = {
        "summary": [line.rstrip() for line in summary.splitlines()],
        "farther_than": FAR,
        "farthest": farthest(found.results),
        "iterations_of_two_nodes": spread(nodes),
    }
    print(write_result("validation", figures))
    return 0


if __name__ == "__main__":
    only_help(__doc__)
    sys.exit(main())
