"""A stage of gpu_record.py in a process of its own: python -m recording.worker JOB.json RESULT.json"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def main(job_file: str, result_file: str) -> None:
    job: dict[str, Any] = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        result = importlib.import_module(f"recording.{job['stage']}").run(job)
    except Exception as error:
        traceback.print_exc()
        result = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
