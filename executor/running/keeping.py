"""Where and how often a job saves checkpoints, and where a later run continues its data."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from executor.optimizer import OffloadedOptimizer
from executor.running.stopping import StopRequest
from executor.saving.manifest import find_checkpoint, is_checkpoint
from executor.saving.restoring import Restored, stored_extra
from executor.training import StepReport
from pstar_sim.errors import CheckpointError, Stopped


@dataclass(frozen=True, kw_only=True)
class JobPosition:
    """empty: the model was built without memory, which draws other random numbers.
    note: words for the checkpoint.
    """

    steps: int = 0
    sequences: int = 0
    empty: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """save: folder for checkpoints.
    every: steps between two (None: one at the end).
    resume: a checkpoint, or a folder with those of `newest`.
    newest: how many to keep, each in a folder in `save` (None: one, in `save` itself).

    Raises CheckpointError for flags that do not go together.
    """

    save: str | None = None
    every: int | None = None
    resume: str | None = None
    newest: int | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.save is None:
            raise CheckpointError(f"--save-every {self.every} needs a folder: add --save FOLDER")
        if self.newest is not None and self.save is None:
            raise CheckpointError(f"--keep {self.newest} needs a folder: add --save FOLDER")

    def check(self, steps: int) -> Restored | None:
        """Facts of the checkpoint `resume`, if given. Raises CheckpointError where the job cannot continue from it, a
        checkpoint in `save` would be lost, or `save` cannot be written.

        steps: in all.
        """
        if self.save is not None:
            self._check_kept(Path(self.save))
        if self.save is not None:
            _try_folder(Path(self.save))
        if self.resume is None:
            return None
        stored = stored_extra(newest_checkpoint(self.resume))
        if stored.iteration >= steps:
            raise CheckpointError(
                f"--resume {self.resume}: {stored.iteration} steps are done and --steps {steps} asks for no more; "
                "raise --steps, which counts from the first step of all runs"
            )
        return stored

    def _check_kept(self, save: Path) -> None:
        old = newest_checkpoint(save)
        if not is_checkpoint(old):
            return
        goes_on = self.resume is not None and Path(self.resume).resolve() in (save.resolve(), old.resolve())
        if not goes_on:
            raise CheckpointError(
                f"--save {save}: the folder holds a checkpoint, of iteration {stored_extra(old).iteration}, that would "
                f"be lost; continue from it with --resume {save}, or give another folder"
            )
        if (self.newest is None) != (old == find_checkpoint(save)):
            other = "in folders of their own; add --keep N" if self.newest is None else "itself; leave --keep out"
            raise CheckpointError(f"--save {save}: the folder holds checkpoints {other}, or give another folder")

    def begin(self, *, steps: int, data: dict[str, Any], empty: bool) -> JobPosition:
        """Raises as `check`, before anything is built.

        data: identifies the stream, which begins anew if the checkpoint's differs.
        """
        stored = self.check(steps)
        if stored is None:
            return JobPosition(empty=empty)
        job = stored.extra.get("job") if isinstance(stored.extra, dict) else None
        if job is None:
            return JobPosition(steps=stored.iteration, empty=empty, note=f"{stored.note}; the data begins anew")
        same = job["data"] == data
        return JobPosition(
            steps=stored.iteration,
            sequences=int(job["sequences"]) if same else 0,
            empty=bool(job["empty"]),
            note=stored.note + ("" if same else "; the data is not the checkpoint's and begins anew"),
        )

    @property
    def weights(self) -> Path | None:
        """None for a job that begins."""
        return None if self.resume is None else newest_checkpoint(self.resume)

    def load(self, optimizer: OffloadedOptimizer) -> None:
        if self.resume is not None:
            optimizer.load(newest_checkpoint(self.resume))

    def saving(
        self,
        optimizer: OffloadedOptimizer,
        *,
        last: int,
        extra: Callable[[int], Any],
        on_step: Callable[[StepReport], None] | None,
        stop: StopRequest,
    ) -> Callable[[StepReport], None]:
        """The function to call after each step: `on_step`, then a checkpoint if due. If any rank was asked to stop, it
        saves one and raises Stopped.
        """

        def after(report: StepReport) -> None:
            if on_step is not None:
                on_step(report)
            if self.save is None:
                return
            done, ranks = report.step + 1, optimizer.session.ranks
            stops = stop.asked if ranks is None else ranks.any(stop.asked)
            if stops or report.step == last or (self.every is not None and done % self.every == 0):
                folder = Path(self.save) if self.newest is None else Path(self.save) / f"{STEP}{done:08d}"
                optimizer.save(folder, extra={"job": extra(done)})
                if self.newest is not None and (ranks is None or ranks.rank == 0):
                    _remove_older(Path(self.save), self.newest)
            if stops and report.step != last:
                raise Stopped(
                    f"stopped by SIGTERM after step {report.step}; continue with --resume {self.save}, whose "
                    f"checkpoint has {done} steps"
                )

        return after


STEP = "step-"  # and the number of steps: the folders of checkpoints under --keep
_GOING = ".removing"


def newest_checkpoint(folder: str | Path) -> Path:
    """Itself, or the newest whole one that --keep left in it."""
    whole = find_checkpoint(folder)
    if is_checkpoint(whole):
        return whole
    return next(reversed(_kept(Path(folder).expanduser())), whole)


def _kept(folder: Path) -> list[Path]:
    rows = sorted(folder.glob(f"{STEP}*")) if folder.is_dir() else []
    return [path for path in rows if path.name.removeprefix(STEP).isdigit() and is_checkpoint(path)]


def _remove_older(folder: Path, newest: int) -> None:
    for path in _kept(folder)[:-newest]:
        path.rename(path.with_name(f".{path.name}{_GOING}"))  # a kill while it is removed leaves no half checkpoint
    for path in folder.glob(f".{STEP}*{_GOING}"):
        shutil.rmtree(path)


def _try_folder(folder: Path) -> None:
    place = next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())
    try:
        with TemporaryFile(dir=place) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: {place} cannot be written to ({error.strerror}); give a folder on a disk with room"
        ) from None
