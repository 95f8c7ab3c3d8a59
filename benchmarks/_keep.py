"""Keeping results of a script for a machine with a GPU, in a folder that is complete at any moment: such a machine may
go away at any moment.

Files: NAME.partial.jsonl (one line per result; the script continues from them), NAME.log (everything printed, by child
processes too), NAME.json (the final result). No file grows beyond FILE_BYTES.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["FILE_BYTES", "Keep", "check_place", "python_path", "results_folder", "results_name"]

FILE_BYTES = 16 << 20
_GRACE_S = 10.0  # seconds between the signal that makes a process print its stacks and the signal that ends it


def python_path(*folders: Path) -> str:
    """Returns PYTHONPATH with these folders before its present folders, which may hold packages that the script
    needs."""
    there = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([there] if there else [])])


def results_folder(text: str) -> Path:
    """Returns the value of --out. Raises argparse's error for a value that cannot be a folder of results."""
    path = Path(text)
    if path.is_dir():
        return path
    if path.exists():
        raise argparse.ArgumentTypeError(f"{text!r} is a file; name a folder")
    if path.suffix in (".json", ".jsonl"):
        raise argparse.ArgumentTypeError(f"{text!r} is the name of a file; name the folder that the files go to")
    return path


def results_name(text: str) -> str:
    """Returns the value of --name, with or without .json. Raises argparse's error for a value that is not a file
    name."""
    name = text.removesuffix(".json")
    if name in ("", ".", "..") or Path(name).name != name:
        raise argparse.ArgumentTypeError(f"{text!r} is not a name of a file; the folder is given by --out")
    return name


def check_place(folder: Path, *names: str) -> None:
    """Make the folder. If files of these names cannot be written in it, end the program with one line, before any
    work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in names):
            if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
                raise SystemExit(f"{path}: cannot be written: it is not a file, or read-only; choose another --out")
            with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
                pass  # a result is written to such a file and then renamed
    except (OSError, ValueError) as reason:
        raise SystemExit(f"{folder}: cannot be written: {reason}; choose another --out") from None


class Keep:
    """Files of one script's results. Raises the errors of `check_place`.

    folder: made if it is missing.
    name: name of the script's files in it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.partial = folder / f"{name}.partial.jsonl"
        self.log = folder / f"{name}.log"
        check_place(folder, self.partial.name, self.log.name, f"{name}.json")
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        self.note(line)

    def note(self, line: str) -> None:
        """Keep a line. A line that no longer fits the log is only printed, and the log's last line says so."""
        data = (line + "\n").encode("utf-8", errors="replace")
        with self._lock, self.log.open("ab") as file:
            room = FILE_BYTES - 200 - file.tell()
            if len(data) <= room:
                file.write(data)
            elif room > 0:
                file.write(b"(the log is full)\n".rjust(room + 1, b"."))

    def run(
        self, command: Sequence[str], *, limit_s: float, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> tuple[int, bool]:
        """Run a process and print its output line by line. Returns (exit status, whether its time was up).

        A process whose time is up first gets SIGABRT, on which Python (by faulthandler, in whatever C code it hangs)
        prints the stacks of all threads. Then the process and all that it started are killed.
        """
        process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env={**os.environ, **(environment or {}), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        over = threading.Event()
        done = threading.Event()

        def end_it() -> None:
            if done.wait(max(limit_s, 1.0)):
                return
            over.set()
            if process.poll() is None:
                process.send_signal(signal.SIGABRT)
                done.wait(_GRACE_S)
            _kill_group(process.pid)

        guard = threading.Thread(target=end_it, daemon=True)
        guard.start()
        try:
            for line in process.stdout:
                self.say(line.rstrip("\n"))
            status = process.wait()
        finally:
            done.set()
            guard.join()
            _kill_group(process.pid)
            process.stdout.close()
        return status, over.is_set()


def _kill_group(leader: int) -> None:
    """Kill the process and the processes that it started: a grandchild would keep the device, and the pipe, open."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # all have ended
