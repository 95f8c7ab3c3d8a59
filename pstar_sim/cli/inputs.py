"""From flags to machine, workload, settings and policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pstar_sim.arguments import parse_bytes
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.cli.captured import has_preset, kind_of
from pstar_sim.core.plan import Settings
from pstar_sim.dtypes import MASTER
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.planner.batch_shares import share_out, shares_of_batch
from pstar_sim.planner.jobs import Job
from pstar_sim.planner.ways import Way, candidates
from pstar_sim.units import MIB
from pstar_sim.words import meant
from pstar_sim.workload.adapter import adapter
from pstar_sim.workload.axes import Axes, AxesGiven, all_axes
from pstar_sim.workload.presets import default_dtype
from pstar_sim.workload.trace import load_variants
from pstar_sim.workload.workload import Workload, retype

if TYPE_CHECKING:
    from pstar_sim.cli.flags import MachineFlags, OptionalMachineFlags, OptionalWorkloadFlags, SettingFlags

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # micro-batches that a preset's global batch may be cut into
MOST_SPLITS, LARGE_BATCH = 5, 64  # splits to try at most; larger micro-batches only if none else is possible


def machine_of(flags: MachineFlags | OptionalMachineFlags) -> Machine:
    """With --nodes, --gpus, --gpu-memory, --host-memory, --disks, --cpu-threads and --set."""
    if flags.machine is None:
        raise PstarError("--machine is needed (see `pstar machines`)")
    return load_machine(
        flags.machine,
        gpu_memory=flags.gpu_memory,
        host_memory=flags.host_memory,
        nodes=flags.nodes,
        gpus=flags.gpus,
        cpu_threads=flags.cpu_threads,
        overrides=flags.changes or (),
        disks=flags.folders,
    )


def settings_of(flags: SettingFlags) -> Settings:
    chunk = parse_bytes(flags.chunk) if flags.chunk is not None else None
    if chunk is not None and chunk < MIB:
        raise PstarError(f"--chunk {flags.chunk}: a chunk holds at least 1 MiB (128MiB is usual)")
    return Settings(
        update=flags.update,
        clip=flags.clip is not False,
        chunk_bytes=chunk,
        loop=flags.loop,
        sums=flags.sums or Settings.sums,
        effort=flags.effort,
    )


def axes_of(flags: Axes) -> AxesGiven:
    """Raises PstarError for a text that is no adapter."""
    given = flags.given
    if flags.lora is not None:
        try:
            given["lora"] = adapter(flags.lora)
        except ModelError as error:
            meaning = meant(str(flags.lora))
            raise PstarError(f"--{error}" + (f"; {meaning}" if meaning else "")) from None
    return given


def workload_of(job: OptionalWorkloadFlags, machine: Machine) -> Workload:
    """The hardest rank's, if shares differ."""
    return share_out(workloads_of(job, machine), machine).workload


def workloads_of(job: OptionalWorkloadFlags, machine: Machine, *, nearly: bool = False) -> tuple[Workload, ...]:
    """Per rank, the variant of --trace that agrees with the flags, or the preset --model with --batch (of all GPUs) and
    --seq; a trace's own batch is one GPU's.

    nearly: as in `shares_of_batch`.

    Raises PstarError for flags that name none or several variants, missing flags, and a batch that ranks cannot share.
    """
    return job_of(job).of(machine, nearly=nearly)


def job_of(flags: OptionalWorkloadFlags, *, parallel: str | None = None) -> Job:
    """Raises PstarError for flags missing or at odds."""
    kind = Job if flags.model is None else kind_of(flags.model, flags, parallel=parallel)
    if flags.trace is not None:
        for name, axis in all_axes().items():
            if axis.not_of_traces and getattr(flags, name) is not None:
                raise PstarError(f"--{name} is for presets (--model); {axis.not_of_traces}")
    else:
        _check_sizes(flags)
    return kind(
        model=flags.model,
        trace=flags.trace,
        batch=flags.batch,
        seq=flags.seq if flags.model is None else sequence_of(flags.model, flags.seq),
        micro_batches=flags.micro_batches,
        **axes_of(flags),
    )


def _check_sizes(flags: OptionalWorkloadFlags) -> None:
    if flags.model is None:
        raise PstarError("give --trace FILE, or --model NAME with --batch and --seq")
    seq = sequence_of(flags.model, flags.seq)
    missing = [flag for flag, value in (("--batch", flags.batch), ("--seq", seq)) if value is None]
    if missing:
        raise PstarError(f"--model needs {' and '.join(missing)}")


def sequence_of(model: str, seq: int | None) -> int | None:
    """--seq; without it that of an image, None for text."""
    entry = model_entry(model) if seq is None and has_preset(model) else None
    return entry.max_seq if entry is not None and entry.image else seq


def needed_sequence(model: str, seq: int | None) -> int:
    """Raises PstarError for text without --seq."""
    sequence = sequence_of(model, seq)
    if sequence is None:
        raise PstarError(f"--seq is needed for {model}: tokens per sequence, such as --seq 2048")
    return sequence


def cut_of(job: OptionalWorkloadFlags, machine: Machine) -> Callable[[int], Workload] | None:
    """A GPU's sequences per micro-batch -> its job, of --trace's variants; None for a preset."""
    return None if job.trace is None else partial(job_of(job).share, machine=machine)


def variants_of(job: OptionalWorkloadFlags, global_batch: int, machine: Machine) -> tuple[Way, ...]:
    """For --global-batch: variants of --trace that other flags allow, or the preset --model in SPLITS micro-batches.

    Raises PstarError without any, and for ranks with different shares.
    """
    if job.batch is not None or job.micro_batches is not None:
        raise PstarError(
            "--global-batch chooses --batch and --micro-batches: give --global-batch alone, or both of them"
        )
    shares = set(shares_of_batch(global_batch, machine))
    if len(shares) > 1:
        raise PstarError(f"the ranks of {machine.name} take different shares of a batch; give --batch instead")
    if job.trace is None:
        return _preset_variants(job, machine, shares.pop())
    known = load_variants(job.trace)
    found = [w for w in known if _agrees(w, job)]
    if not found:
        given = [f"--seq {job.seq}"] * (job.seq is not None) + [f"--dtype {job.dtype}"] * (job.dtype is not None)
        if job.checkpointing is not None:
            given.append("--checkpointing" if job.checkpointing else "--no-checkpointing")
        raise PstarError(
            f"{job.trace}: no variant of {len(known)} has {', '.join(given)}; leave one of these flags out, or trace "
            "the model with them"
        )
    made = [w if w.dtype == MASTER else retype(w, job.dtype or default_dtype(machine)) for w in found]
    return candidates([job_of(job).beside(w) for w in made], shares.pop())


def _agrees(w: Workload, job: OptionalWorkloadFlags) -> bool:
    """With --seq, --checkpointing and --dtype (bf16 and fp16 are equal)."""
    if job.seq is not None and w.sequence != job.seq:
        return False
    if job.checkpointing is not None and w.checkpointing != job.checkpointing:
        return False
    return job.dtype is None or w.dtype == job.dtype or MASTER not in (job.dtype, w.dtype)


def _preset_variants(job: OptionalWorkloadFlags, machine: Machine, share: int) -> tuple[Way, ...]:
    open_ = job.checkpointing is None and job.recompute is None
    choices = (True, False) if open_ else (job.checkpointing is not False,)
    possible = [split for split in SPLITS if share % split == 0]
    splits = [split for split in possible if share // split <= LARGE_BATCH] or possible[-1:]
    made = [
        job_of(replace(job, batch=share // split, checkpointing=checkpointing)).share(share // split, machine)
        for split in splits[:MOST_SPLITS]
        for checkpointing in choices
    ]
    return candidates(made, share)
