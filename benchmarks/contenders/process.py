"""A contender's own process and the pipe to it: one JSON line there, one JSON line back, in bounded time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from _keep import python_path

from contenders.memory import host_bytes
from contenders.task import Task

__all__ = ["Failed", "Process", "processes"]

BENCHMARKS = Path(__file__).resolve().parents[1]


class Failed(Exception):
    """A contender's message, or how its process died.

    lasting: whether the contender would fail again (not if its time was up).
    """

    def __init__(self, why: str, *, lasting: bool = True) -> None:
        super().__init__(why)
        self.lasting = lasting


class Process:
    """A contender's process.

    interpreter: the Python that runs it.
    log: file for its output.
    most_host_bytes: the process is killed when it holds more.
    """

    def __init__(
        self,
        task: Task,
        *,
        interpreter: str,
        log: Path,
        environment: Mapping[str, str],
        most_host_bytes: int | None = None,
    ) -> None:
        self.task = task
        self._log = log
        self._most_host_bytes = most_host_bytes
        self._output: IO[bytes] = log.open("wb")
        self._process = subprocess.Popen(
            [interpreter, "-m", "contenders.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            cwd=BENCHMARKS,
            env={
                **os.environ,
                "PYTHONPATH": python_path(BENCHMARKS.parent, BENCHMARKS),
                "PYTHONFAULTHANDLER": "1",
                "OMP_NUM_THREADS": str(task.threads),
                **environment,
            },
        )

    def start_building(self) -> None:
        self._send({"do": "build", "task": self.task.to_json()})

    def ask(self, what: str, timeout_s: float) -> dict[str, Any]:
        """Send a request. Returns the answer. Raises Failed where the contender fails, dies or takes longer than
        `timeout_s`."""
        self._send({"do": what})
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        give_up_s = time.perf_counter() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = give_up_s - time.perf_counter()
            if left_s <= 0:
                self.abort()
                raise Failed(f"no answer within {timeout_s:.0f} s", lasting=False)
            if self._most_host_bytes is not None and (host_bytes(self._process.pid) or 0) > self._most_host_bytes:
                self.kill()
                raise Failed(f"killed: it held more than {self._most_host_bytes} bytes of host memory")
            ready, _, _ = select.select([self._process.stdout], [], [], min(left_s, 0.05))
            if ready:
                part = os.read(self._process.stdout.fileno(), 65536)
                if not part:
                    raise Failed(f"the process ended ({self._process.wait()}): {self._last_words()}")
                line += part
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(str(answer["failed"]))
        return answer

    def close(self) -> None:
        """Close the contender's input and wait for its end; kill it if it does not end."""
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._output.close()

    def abort(self) -> None:
        """End the process by SIGABRT, on which faulthandler writes the stacks of all threads."""
        self._process.send_signal(signal.SIGABRT)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"the process ended ({self._process.wait()}): {self._last_words()}") from None

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"


@contextlib.contextmanager
def processes(made: list[Process]) -> Iterator[list[Process]]:
    """Yields the list of processes. Afterwards all are ended, also after an error."""
    try:
        yield made
    finally:
        for process in made:
            process.close()
