"""Run notebooks in place, keeping their outputs small and without anything of the machine they ran on.

python notebooks/execute.py notebooks/*.ipynb
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

KEEP = {"kernelspec", "language_info"}


def execute(path: Path, *, timeout_s: int = 300) -> nbformat.NotebookNode:
    """The notebook with fresh outputs (not written). Raises nbclient's CellExecutionError where a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata = {k: v for k, v in notebook.metadata.items() if k in KEEP}
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(paths: list[str]) -> None:
    for name in paths:
        path = Path(name)
        nbformat.write(execute(path), path)
        sys.stdout.write(f"{path}: done\n")


if __name__ == "__main__":
    main(sys.argv[1:])
