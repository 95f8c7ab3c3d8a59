"""Results of benchmarks: NAME.json in benchmarks/results or another folder, with machine, versions, date, the commit of
the measurement and the files that the figures depend on.

`python benchmarks/_results.py` (`make results`) lists the results whose dependencies have changed since.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pstar_sim.files import write_atomically

__all__ = ["PLANNED", "RESULTS", "ROOT", "changes_since", "list_changes", "measured_at", "taken_at", "write_result"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

PLANNED = (
    "pstar_sim/bounds/**", "pstar_sim/catalog/**", "pstar_sim/core/**", "pstar_sim/cost.py", "pstar_sim/planner/**",
    "pstar_sim/policy/**", "pstar_sim/sim/**", "pstar_sim/workload/**",
)  # fmt: skip
EXECUTED = (*PLANNED, "executor/**")

DEPENDENCIES: Mapping[str, tuple[str, ...]] = {
    "accuracy": EXECUTED,
    "activations": PLANNED,
    "architectures*": (*EXECUTED, "tests/executor/semantics_rows.py", "benchmarks/semantics.py"),
    "axolotl": (*EXECUTED, "benchmarks/contenders/venv.py"),
    "bounds": (*PLANNED, "tests/helpers/**"),
    "bounds_kinds": (*PLANNED, "tests/helpers/**"),
    "bounds_ranks": (*PLANNED, "tests/helpers/**"),
    "calibrated": EXECUTED,
    "capture": (
        "executor/capture.py", "executor/models.py", "executor/moments/**", "pstar_sim/workload/**",
    ),
    "captured_peaks": (*EXECUTED, "tests/executor/moments/test_kernel_flavours.py"),
    "certify": PLANNED,
    "event_cost": EXECUTED,
    "disks": EXECUTED,
    "disks_exact": (*EXECUTED, "benchmarks/disks.py"),
    "disks_checkpoint": (*EXECUTED, "benchmarks/disks.py"),
    "disks_memory": (*EXECUTED, "benchmarks/disks.py"),
    "disks_published": PLANNED,
    "demo": (*EXECUTED, "pstar_sim/cli/**", "pstar_sim/report/**"),
    "families": PLANNED,
    "fit_efficiency": (*PLANNED, "pstar_sim/validation/**"),
    "frameworks": (*PLANNED, "pstar_sim/frameworks/**"),
    "gemm": ("benchmarks/data/gemm_efficiency.csv", "pstar_sim/catalog/product_shape.py"),
    "gemm_forms": ("benchmarks/data/gemm_efficiency.csv", "benchmarks/gemm.py"),
    "gpu_*": (*EXECUTED, "tests/**"),
    "interrupts": (*EXECUTED, "benchmarks/_interrupts.py"),
    "karma": EXECUTED,
    "kills": EXECUTED,
    "layouts_memory": (*PLANNED, "pstar_sim/frameworks/**"),
    "load_weights": EXECUTED,
    "optimal*": PLANNED,
    "options": PLANNED,
    "oracle": (*PLANNED, "tests/oracle/**"),
    "overhead": EXECUTED,
    "overlap": PLANNED,
    "patrickstar_node": PLANNED,
    "qlora": PLANNED,
    "peers*": (*EXECUTED, "benchmarks/contenders/**"),
    "planning_speed": PLANNED,
    "play_speed": PLANNED,
    "relay": EXECUTED,
    "reliability": (*EXECUTED, "benchmarks/_*.py", "benchmarks/kills.py"),
    "semantics*": (*EXECUTED, "tests/executor/semantics_rows.py"),
    "scripts": (*EXECUTED, "tests/executor/script_runs.py", "tests/executor/scripts/**"),
    "search_constants": PLANNED,
    "simulate": PLANNED,
    "sweep": PLANNED,
    "sums": EXECUTED,
    "table_policies": PLANNED,
    "tide_bytes": PLANNED,
    "mixed_stages": PLANNED,
    "whale": EXECUTED,
    "validation": (*PLANNED, "pstar_sim/validation/**"),
}  # fmt: skip
"""Pattern of a result's name -> globs of the files that its figures depend on, beside its own script."""


def dependencies(name: str) -> list[str]:
    """Returns the globs of the result of that name; a result that is not in the table depends on everything."""
    pattern = next((p for p in DEPENDENCIES if fnmatch.fnmatchcase(name, p)), None)
    script = f"benchmarks/{name if pattern is None else pattern.rstrip('*_')}.py"
    own = [script] if (ROOT / script).exists() else []
    return sorted([*(DEPENDENCIES[pattern] if pattern is not None else ("pstar_sim/**", "executor/**")), *own])


def taken_at(globs: Sequence[str], root: Path = ROOT) -> dict[str, object] | None:
    """Returns the commit of the working tree, and whether files of these globs differ from it; None without git."""
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    changed = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *(f":(glob){glob}" for glob in globs))
    return {"commit": commit, "dirty": bool(changed)}


def measured_at(stamp: Mapping[str, Any] | None) -> str:
    """Returns the words on a result's commit for a document."""
    if stamp is None:
        return "measured at an unknown commit"
    before = "or before " if stamp.get("at_or_before") else ""
    return f"measured at {before}{stamp['commit'][:7]}{' with changes' if stamp['dirty'] else ''}"


def write_result(
    name: str,
    figures: Mapping[str, object],
    *,
    folder: Path | None = None,
    stamp: Mapping[str, object] | None = None,
) -> Path:
    """Write the figures. Returns the path.

    stamp: of the commit, where some figures are kept from an older commit.
    """
    packages = ("torch", "transformers", "numpy", "simpy", "pstar-sim")
    content = {
        "date": date.today().isoformat(),
        "taken_at": stamp or taken_at(dependencies(name)),
        "depends_on": dependencies(name),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {p: version for p in packages if (version := _version(p)) is not None},
        **figures,
    }
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")
    return path


def list_changes(root: Path = ROOT) -> list[str]:
    """Returns a line for each result whose dependencies changed since its commit, or whose commit is not known here;
    then a summary."""
    files = sorted((root / "benchmarks" / "results").glob("*.json"))
    if _git(root, "rev-parse", "HEAD") is None:
        return [f"{root} is not a git checkout: whether the {len(files)} results are up to date is not known"]
    lines: list[str] = []
    entries = unknown = 0
    for path in files:
        result = json.loads(path.read_text(encoding="utf-8"))
        # A part that was measured separately has a commit of its own.
        parts = {key: value for key, value in result.items() if isinstance(value, dict) and "taken_at" in value}
        for part, holder in parts.items() if parts else [("", result)]:
            name = f"{path.stem}: {part}" if part else path.stem
            entries += 1
            stamp = holder.get("taken_at")
            if stamp is None or _git(root, "cat-file", "-e", f"{stamp['commit']}^{{commit}}") is None:
                which = "no commit is known" if stamp is None else f"{stamp['commit'][:7]} is not in this clone"
                lines.append(f"{name:<28} {which}")
                unknown += 1
                continue
            if changed := changes_since(root, stamp["commit"], result.get("depends_on", dependencies(path.stem))):
                lines.append(f"{name:<28} {measured_at(stamp)}; since then {changed}")
    old = len(lines) - unknown
    lines.append(f"{old} of {entries} results in {len(files)} files are older than what they depend on")
    if unknown:
        shallow = _git(root, "rev-parse", "--is-shallow-repository") == "true"
        lines.append(
            f"{unknown} unknown" + ("; this clone is shallow: `git fetch --unshallow` brings its history" * shallow)
        )
    return lines


def changes_since(root: Path, commit: str, globs: Sequence[str]) -> str:
    """Returns "3 commits: pstar_sim/core/**, ..."; "" if nothing changed. Uncommitted changes count too."""
    specs = {glob: f":(glob){glob}" for glob in globs}
    # Compared as trees, so that a reverted change does not count.
    touched = [g for g, spec in specs.items() if _git(root, "diff", "--name-only", commit, "HEAD", "--", spec)]
    edited = [g for g, spec in specs.items() if _git(root, "diff", "--name-only", "HEAD", "--", spec)]
    said = []
    if touched:
        count = _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *(specs[g] for g in touched)) or "0"
        said.append(f"{count} commit{'s'[: count != '1']}: {', '.join(touched)}")
    if edited:
        said.append(f"changes that are not committed: {', '.join(edited)}")
    return "; ".join(said)


def _git(root: Path, *arguments: str) -> str | None:
    """Returns git's output; None where there is no git, no repository of this very folder, or git refuses."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    """Returns the version of the package; None where it is not installed (a machine with a GPU may have the source tree
    and torch only)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.stdout.write("\n".join(list_changes()) + "\n")
