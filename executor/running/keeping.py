"""Keeping a job: where and how often it saves checkpoints, and where a later run continues its data.

Lies between `TrainingJob.run` and `optimizer.save`: knows jobs, neither chunks nor file formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from executor.optimizer import OffloadedAdamW
from executor.saving.manifest import find_checkpoint, is_checkpoint
from executor.saving.restoring import Restored, stored_extra
from executor.training import StepReport
from pstar_sim.errors import CheckpointError

__all__ = ["JobPosition", "Keeping"]


@dataclass(frozen=True, kw_only=True)
class JobPosition:
    """The position of a job.

    empty: whether the model was built without memory, which draws other random numbers.
    note: the checkpoint from which the job continues, in words.
    """

    steps: int = 0
    sequences: int = 0
    empty: bool = False
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """The folder for a job's checkpoints, and the checkpoint from which it continues.

    save: folder for checkpoints.
    every: steps between two checkpoints (None: only one at the end).
    resume: checkpoint to continue from.

    Raises CheckpointError for flags that do not go together.
    """

    save: str | None = None
    every: int | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.every is not None and self.save is None:
            raise CheckpointError(f"--save-every {self.every} needs a folder: add --save FOLDER")

    def check(self, steps: int) -> Restored | None:
        """Returns facts of the checkpoint `resume`, if given. Raises CheckpointError where the job cannot continue from
        it, a checkpoint in `save` would be lost, or `save` cannot be written.

        steps: in all.
        """
        if self.save is not None and is_checkpoint(self.save):
            goes_on = self.resume is not None and Path(self.resume).resolve() == Path(self.save).resolve()
            if not goes_on:
                raise CheckpointError(
                    f"--save {self.save}: the folder holds a checkpoint, of iteration "
                    f"{stored_extra(self.save).iteration}, that would be lost; continue from it with --resume "
                    f"{self.save}, or give another folder"
                )
        if self.save is not None:
            _try_folder(Path(self.save))
        if self.resume is None:
            return None
        stored = stored_extra(self.resume)
        if stored.iteration >= steps:
            raise CheckpointError(
                f"--resume {self.resume}: {stored.iteration} steps are done and --steps {steps} asks for no more; "
                "raise --steps, which counts from the first step of all runs"
            )
        return stored

    def begin(self, *, steps: int, data: dict[str, Any], empty: bool) -> JobPosition:
        """Returns the position at which the job begins. Raises as `check` does, before anything is built.

        data: identifies the stream of data, which begins anew if the checkpoint's differs.
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
        """The folder with the model's values; None for a job that begins."""
        return None if self.resume is None else find_checkpoint(self.resume)

    def load(self, optimizer: OffloadedAdamW) -> None:
        if self.resume is not None:
            optimizer.load(self.resume)

    def saving(
        self,
        optimizer: OffloadedAdamW,
        *,
        last: int,
        extra: Callable[[int], Any],
        on_step: Callable[[StepReport], None] | None,
    ) -> Callable[[StepReport], None]:
        """Returns the function to call after each step: it calls `on_step`, then saves a checkpoint if one is due.

        last: number of the last step.
        extra(steps): additional values to save after this many steps.
        """

        def after(report: StepReport) -> None:
            if on_step is not None:
                on_step(report)
            due = self.every is not None and (report.step + 1) % self.every == 0
            if self.save is not None and (due or report.step == last):
                optimizer.save(self.save, extra={"job": extra(report.step + 1)})

        return after


def _try_folder(folder: Path) -> None:
    """Raise CheckpointError if nothing can be written to `folder`, or to its parent if it does not exist yet."""
    place = next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())
    try:
        with TemporaryFile(dir=place) as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise CheckpointError(
            f"--save {folder}: {place} cannot be written to ({error.strerror}); give a folder on a disk with room"
        ) from None
