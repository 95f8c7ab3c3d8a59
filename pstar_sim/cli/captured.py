"""Configurations without a preset are captured once, and kept in the user's cache folder, under a name of the
configuration's text, sizes, axes and versions; files may be removed at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pstar_sim.catalog.configurations import (
    NoPreset,
    configuration_file,
    every_expert_note,
    is_configuration,
    read_configuration,
    stored_note,
)
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.cli.executor_parts import executor_module
from pstar_sim.errors import PstarError, TraceError
from pstar_sim.planner.jobs import Job
from pstar_sim.version import __version__
from pstar_sim.workload.axes import Axes, all_axes
from pstar_sim.workload.kernels import CAPTURED
from pstar_sim.workload.trace import load_trace, save_trace
from pstar_sim.workload.workload import Workload, repeat_micro_batch

_DECIDING = ("torch", "transformers")
"""Packages whose versions decide what a capture finds."""


def has_preset(model: str) -> bool:
    """False for a configuration without a preset. Raises ModelError for a configuration that cannot be read."""
    if not is_configuration(model):
        return True
    try:
        model_entry(model)
    except NoPreset:
        return False
    return True


def kind_of(model: str, axes: Axes, *, parallel: str | None = None) -> type[Job]:
    """Of the job of a preset or of a configuration without one. Raises PstarError for what the latter cannot have."""
    if has_preset(model):
        return Job
    for name, axis in all_axes().items():
        if getattr(axes, name) is not None and not axis.of_modules and axis.not_of_traces:
            raise PstarError(f"--{name} is for presets (--model); {axis.not_of_traces}")
    if parallel is not None:
        raise PstarError(
            f"--parallel {parallel} is for presets, and none is written for {model}: leave it out for data parallelism"
        )
    return CapturedJob


@dataclass(frozen=True, kw_only=True)
class CapturedJob(Job):
    """As in a preset, activations are recomputed unless something else is said. Adapters of any rank, and bases, have
    one capture in common."""

    @property
    def flavour(self) -> str:
        return CAPTURED

    def share(self, batch: int | None, machine: Machine) -> Workload:
        assert self.model is not None and batch is not None and self.seq is not None
        axes = {
            "dtype": self.dtype_on(machine) if self.autocast is None else None,
            "autocast": self.autocast,
            "checkpointing": self.checkpointing is not False,
            "attention": self.attention,
        }
        adapter = self.adapter
        shape = {"batch": batch, "sequence": self.seq, **{name: value for name, value in axes.items() if value}}
        traced = shape if adapter is None else {**shape, "beside": (adapter.targets, adapter.save)}
        file = configuration_file(self.model)
        kept = _cache() / f"{_digest(file, traced)}.parquet"
        try:
            captured = load_trace(kept)
        except TraceError:  # there is none, or it is damaged
            kept.unlink(missing_ok=True)
            captured = executor_module("capture").capture(f"hf:{file}", beside=adapter, **shape)
            kept.parent.mkdir(parents=True, exist_ok=True)
            save_trace(captured, kept)
            captured = load_trace(kept)
        values = read_configuration(self.model)[1]
        notes = captured.notes, every_expert_note(values), "" if self.base else stored_note(file, values)
        workload = self.beside(replace(captured, notes=", ".join(filter(None, notes))))
        return workload if self.micro_batches in (None, 1) else repeat_micro_batch(workload, self.micro_batches)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pstar-sim" / "captures"


def _digest(file: Path, shape: Mapping[str, object]) -> str:
    versions = [__version__]
    for package in _DECIDING:
        try:
            versions.append(version(package))
        except PackageNotFoundError:  # the capture says so
            versions.append("")
    rows = [str(file.resolve()), file.read_text(encoding="utf-8"), shape, versions]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:24]
