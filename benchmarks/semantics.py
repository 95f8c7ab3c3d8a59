"""The semantics table: every row of tests/executor/semantics_rows.py x dtype x policy beside plain PyTorch.

Prints, for each row and dtype, the largest relative difference of losses, parameters, master copies, moments and
buffers over all policies, and writes every cell to benchmarks/results/semantics.json. Exit status 1 if a cell fails.

With --only or --policy the rest of the file stays as it was. A run with failures writes nothing.

    python benchmarks/semantics.py [--only TEXT] [--policy NAME ...] [--device cuda] [--no-result]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _results import write_result


def load_rows() -> Any:
    path = Path(__file__).parent.parent / "tests" / "executor" / "semantics_rows.py"
    spec = importlib.util.spec_from_file_location("semantics_rows", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["semantics_rows"] = module
    spec.loader.exec_module(module)
    return module


def _table(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns row -> dtype -> figure -> policy -> number; an exception instead of figures where there is one."""
    table: dict[str, Any] = {}
    for cell in cells:
        place = table.setdefault(cell["row"], {}).setdefault(cell["dtype"], {})
        if "exception" in cell:
            place["exception"] = cell["exception"]
        for key in ("difference", "deviations", "skipped_steps"):
            if key in cell:
                place.setdefault(key, {})[cell["policy"]] = cell[key]
    return table


def _last(name: str, key: str) -> dict[str, Any]:
    path = Path(__file__).parent / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")).get(key) or {} if path.exists() else {}


def main(name: str = "semantics", chosen_rows: Sequence[Any] | None = None) -> int:
    """Run the cells of the rows (those of semantics_rows.py) and write them to results/NAME.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--policy", nargs="+", help="these policies instead of all")
    parser.add_argument("--device", default="cpu", help="cpu (the virtual accelerator) or cuda")
    parser.add_argument("--no-result", action="store_true", help="do not write the result file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = load_rows()
    cells: list[dict[str, Any]] = []
    failed, started_s = 0, time.perf_counter()
    print(f"{'row':<42}" + "".join(f"{dtype:>26}" for dtype in rows.DTYPES))
    for row in rows.ROWS if chosen_rows is None else chosen_rows:
        if args.only not in row.name:
            continue
        shown = []
        for dtype in rows.DTYPES:
            if dtype in row.exceptions:
                cells.append({"row": row.name, "dtype": dtype, "exception": row.exceptions[dtype]})
                shown.append("exception *")
                continue
            found: list[tuple[float, str]] = []
            for policy in args.policy or row.policies:
                cell: dict[str, Any] = {"row": row.name, "dtype": dtype, "policy": policy}
                cells.append(cell)
                try:
                    result = rows.run_cell(row, dtype, policy, device=args.device)
                except Exception as error:  # a cell that fails is a line of the table; the other cells still run
                    cell["error"] = f"{type(error).__name__}: {error}"
                    found.append((float("inf"), policy))
                    failed += 1
                    continue
                cell |= {
                    "difference": result.worst, "deviations": result.deviations, "skipped_steps": result.skipped_steps
                }  # fmt: skip
                found.append((result.worst, policy))
                failed += not result.worst <= rows.TOLERANCE
            worst, policy = max(found)
            shown.append("FAILED " + policy if worst == float("inf") else f"{worst:.1e}" + f" {policy}" * (worst > 0))
        print(f"{row.name:<42}" + "".join(f"{text:>26}" for text in shown), flush=True)
    for cell in cells:
        if "exception" in cell:
            print(f"* {cell['row']}, {cell['dtype']}: {cell['exception']}")
        if "error" in cell:
            print(f"FAILED {cell['row']}, {cell['dtype']}, {cell['policy']}: {cell['error'][:300]}")
    name += "" if args.device == "cpu" else f"_{args.device}"
    table, stamp = _table(cells), None
    if args.only or args.policy:  # the other rows (and policies) keep their last figures, and the file their commit
        stamp = _last(name, "taken_at")
        for row, kept in _last(name, "table").items():
            for dtype, cell in kept.items():
                mine = table.setdefault(row, {}).setdefault(dtype, {})
                table[row][dtype] = {
                    key: {**cell[key], **mine.get(key, {})} for key in cell if key != "exception"
                } or cell
    differences = [d for row in table.values() for cell in row.values() for d in cell.get("difference", {}).values()]
    figures = {
        "runs": len(differences),
        "equal_to_the_bit": differences.count(0.0),
        "largest_relative_difference": max(differences, default=0.0),
        "allowed_relative_difference": rows.TOLERANCE,
    }
    ran = sum("difference" in cell for cell in cells)
    print(f"{ran} runs in {time.perf_counter() - started_s:.0f} s, {failed} failed")
    print(
        f"in the table: {figures['runs']} runs, {figures['equal_to_the_bit']} equal to the bit, largest relative "
        f"difference {figures['largest_relative_difference']:.1e} (allowed {rows.TOLERANCE:.0e})"
    )
    if not args.no_result and not failed:
        write_result(name, {**figures, "table": table}, stamp=stamp)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
