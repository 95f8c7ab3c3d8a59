"""A row of figures per step, to files and to tools that people watch runs with, from a session's status.

A row without its gradient norm yet, as updates run beside the next forward, is written with the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from executor.measuring.status import Status
from executor.memory.update import Update
from executor.optimizer import OffloadedOptimizer
from pstar_sim.errors import PstarError
from pstar_sim.files import check_writable

Row = Mapping[str, Any]


class StepSink(Protocol):
    """A place for rows, `step` among the keys; values are numbers, texts, truth values, None, or, for `waits_s`,
    seconds by cause."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """A JSON object per line, complete after each step."""

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self._file: IO[str] = Path(path).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115 (see close)

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Writes a folder for `tensorboard --logdir`. Raises PstarError where the package is missing."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing("tensorboard", folder) from None
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, global_step=row["step"], walltime=row["unix_s"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of a Weights & Biases project. Raises PstarError without package or run."""

    def __init__(self, project: str) -> None:
        try:
            from wandb import init
        except ImportError:  # also of a folder that it has written here
            raise _missing("wandb", project) from None
        try:
            self._run: Any = init(project=project)
        except Exception as error:  # without a login, a network or a place to write
            raise PstarError(f"wandb:{project}: {error} (or WANDB_MODE=offline)") from error

    def write(self, row: Row) -> None:
        self._run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self._run.finish()


_TOOLS: Mapping[str, Callable[[str], StepSink]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def open_sink(target: str, *, append: bool = False) -> StepSink:
    """target: "FILE.jsonl", "tensorboard:FOLDER" or "wandb:PROJECT".

    append: a file's rows stay.
    """
    tool, colon, name = target.partition(":")
    return _TOOLS[tool](name) if colon and tool in _TOOLS else JsonLines(target, append=append)


def check_log(target: str) -> None:
    """Raise PstarError for a target that cannot be written."""
    from importlib.util import find_spec

    tool, colon, name = target.partition(":")
    if colon and tool in _TOOLS:
        if not name:
            raise PstarError(f"{target!r} names no {'folder' if tool == 'tensorboard' else 'project'}")
        package = find_spec(tool)
        if package is None or package.origin is None:  # a folder of logs is found, but has no origin
            raise _missing(tool, name)
    else:
        check_writable(Path(target))


def _missing(package: str, name: object) -> PstarError:
    return PstarError(f"{package}:{name} needs {package}, which is not installed: pip install {package}")


def _numbers(row: Row) -> dict[str, float]:
    flat = {f"waits_s/{cause}": seconds for cause, seconds in row.get("waits_s", {}).items()}
    rows = {**{name: value for name, value in row.items() if name not in ("step", "unix_s", "waits_s")}, **flat}
    return {name: float(value) for name, value in rows.items() if isinstance(value, int | float)}


class StepLog:
    """Writes a row per step: loss, learning rate, gradient norm, seconds, tokens per second, waits by cause, bytes
    moved and held. On several ranks every rank calls it; the loss is of all ranks, and the first one writes. Close it,
    or use it as a context.

    targets: as for `open_sink`, or sinks.
    append: whether the rows of files stay.
    clock: time of day, in seconds.

    Raises PstarError for a target that cannot be written.
    """

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        *targets: str | StepSink,
        append: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        ranks = optimizer.session.ranks
        self._optimizer = optimizer
        self._sinks = [
            open_sink(target, append=append) if isinstance(target, str) else target
            for target in targets
            if ranks is None or ranks.rank == 0
        ]
        self._clock = clock
        self._waiting: tuple[dict[str, Any], Update] | None = None

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, *, step: int, loss: float, time_s: float, status: Status | None = None) -> None:
        """Write the row of a step, after `optimizer.step()`.

        loss: mean over the micro-batches of this rank.
        status: that of the session now, where it is at hand.
        """
        status = status or self._optimizer.session.status()
        session = self._optimizer.session
        self._write_waiting()
        row = {
            "step": step,
            "unix_s": self._clock(),
            "loss": self._loss(loss),
            "learning_rate": float(self._optimizer.param_groups[0]["lr"]),
            "grad_norm": None,
            "time_s": time_s,
            "tokens_per_s": session.plan.tokens / time_s if time_s > 0 else None,
            "waits_s": dict(status.waits_s),
            "adam_share": status.adam_share,
            **{f"{direction}_bytes": use.moved_bytes for direction, use in status.links.items()},
            "gpu_bytes": status.gpu_bytes,
            "gpu_peak_bytes": status.gpu_peak_bytes,
            "gpu_budget_bytes": status.gpu_budget_bytes,
            "host_bytes": status.host_bytes,
            "host_budget_bytes": status.host_budget_bytes,
            "exchanges": status.exchanges,
            "on_plan": status.on_plan,
            "deviations": status.deviations,
        }
        update = session.updates.last
        if update is not None and update.max_grad_norm is not None:
            self._waiting = row, update
            if update.norm is None:
                return
        self._finish(row, update)

    def _loss(self, loss: float) -> float:
        session = self._optimizer.session
        if session.ranks is None:
            return loss
        rows = session.ranks.meet([float(session.batches.planned_size), loss])
        return sum(size * of_rank for size, of_rank in rows) / sum(size for size, _ in rows)

    def _write_waiting(self) -> None:
        if self._waiting is not None:
            self._finish(*self._waiting)

    def _finish(self, row: dict[str, Any], update: Update | None) -> None:
        self._waiting = None
        if update is not None and update.max_grad_norm is not None and update.norm is not None:
            norm = float(update.norm)
            row["grad_norm"] = norm if norm < float("inf") else None  # an overflow under loss scaling has none
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        """Write what waits, too."""
        try:
            self._write_waiting()
        finally:
            for sink in self._sinks:
                sink.close()
