"""From flags to values: the machine, the workload, the settings and the policies of a command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pstar_sim.arguments import parse_bytes
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.planner.batch_shares import share_out, shares_of_batch
from pstar_sim.planner.ways import Way, candidates
from pstar_sim.units import MIB
from pstar_sim.workload.lora import Adapter, adapter
from pstar_sim.workload.optimizers import with_optimizer
from pstar_sim.workload.presets import default_dtype, preset
from pstar_sim.workload.trace import load_trace, load_variants
from pstar_sim.workload.workload import Workload, retype

if TYPE_CHECKING:
    from pstar_sim.cli.flags import MachineFlags, OptionalMachineFlags, OptionalWorkloadFlags, SettingFlags

__all__ = ["cut_of", "lora_of", "machine_of", "settings_of", "variants_of", "workload_of", "workloads_of"]

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # micro-batches that a preset's global batch may be cut into
MOST_SPLITS, LARGE_BATCH = 5, 64  # splits to try at most; larger micro-batches only if none else is possible


def machine_of(flags: MachineFlags | OptionalMachineFlags) -> Machine:
    """Returns the machine named by --machine, with the changes of --nodes, --gpus, --gpu-memory, --host-memory and
    --set."""
    if flags.machine is None:
        raise PstarError("--machine is needed (see `pstar machines`)")
    return load_machine(
        flags.machine,
        gpu_memory=flags.gpu_memory,
        host_memory=flags.host_memory,
        nodes=flags.nodes,
        gpus=flags.gpus,
        overrides=flags.changes or (),
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
        sums=flags.sums,
        effort=flags.effort,
    )


def lora_of(text: str | None) -> Adapter | None:
    """Returns the adapter of --lora: "r=16", "16", "r=8,targets=q_proj+v_proj". Raises PstarError for another text."""
    if text is None:
        return None
    try:
        return adapter(text)
    except ModelError as error:
        raise PstarError(f"--{error}") from None


def workload_of(job: OptionalWorkloadFlags, machine: Machine) -> Workload:
    """Returns one rank's job: see `workloads_of`. Where ranks take different shares, the workload is as hard as the
    hardest rank's."""
    return share_out(workloads_of(job, machine), machine).workload


def workloads_of(job: OptionalWorkloadFlags, machine: Machine, *, nearly: bool = False) -> tuple[Workload, ...]:
    """Returns the job of each rank: the variant of --trace that agrees with the given flags, or the preset --model with
    --batch and --seq. --batch is the batch of all GPUs together, and each GPU gets its share. Without --batch, the
    batch of a trace is the batch of one GPU.

    nearly: whether ranks may take one sequence more than others, for a batch that they cannot share equally.

    Raises PstarError for flags that name no variant of the trace or more than one, for flags that are missing, and for
    a batch that the ranks cannot share.
    """
    if job.batch is None:
        return (_one_workload(job, machine, None),) * machine.world_size
    shares = shares_of_batch(job.batch, machine, nearly=nearly)
    known = {share: _one_workload(job, machine, share) for share in sorted(set(shares))}
    return tuple(known[share] for share in shares)


def cut_of(job: OptionalWorkloadFlags, machine: Machine) -> Callable[[int], Workload] | None:
    """Returns a function that finds, among the variants of --trace, the job of a GPU with a given number of sequences
    per micro-batch. Returns None for a preset."""
    return None if job.trace is None else partial(_one_workload, job, machine)


def variants_of(job: OptionalWorkloadFlags, global_batch: int, machine: Machine) -> tuple[Way, ...]:
    """Returns the ways in which one rank can run --global-batch: the variants of --trace that the other flags allow, or
    the preset --model in SPLITS micro-batches.

    Raises PstarError for flags that leave no way, and for ranks that take different shares.
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
    made = [w if w.dtype == "fp32" else retype(w, job.dtype or default_dtype(machine)) for w in found]
    return candidates([_optimized(w, job) for w in made], shares.pop())


def _agrees(w: Workload, job: OptionalWorkloadFlags) -> bool:
    """Returns whether a variant of a trace agrees with --seq, --checkpointing and --dtype. bf16 and fp16 count as
    equal."""
    if job.seq is not None and w.sequence != job.seq:
        return False
    if job.checkpointing is not None and w.checkpointing != job.checkpointing:
        return False
    return job.dtype is None or w.dtype == job.dtype or (job.dtype in ("bf16", "fp16") and w.dtype != "fp32")


def _preset_variants(job: OptionalWorkloadFlags, machine: Machine, share: int) -> tuple[Way, ...]:
    """Returns the preset in some of SPLITS micro-batches, with and without recomputation (unless --checkpointing says),
    and the mixes of these block by block."""
    choices = (True, False) if job.checkpointing is None else (job.checkpointing,)
    possible = [split for split in SPLITS if share % split == 0]
    splits = [split for split in possible if share // split <= LARGE_BATCH] or possible[-1:]
    made = [
        _preset(job, machine, share // split, checkpointing)
        for split in splits[:MOST_SPLITS]
        for checkpointing in choices
    ]
    return candidates(made, share)


def _one_workload(job: OptionalWorkloadFlags, machine: Machine, batch: int | None) -> Workload:
    adapter = lora_of(job.lora)
    if job.trace is not None:
        if job.kernels is not None:
            raise PstarError("--kernels is for presets (--model); a trace has the kernels that ran")
        if adapter is not None:
            raise PstarError(
                "--lora is for presets (--model); trace a model that has its adapters: pstar trace py:MODULE:FACTORY, "
                "whose factory returns (nn.Module, example batch)"
            )
        half = job.dtype in ("bf16", "fp16")
        found = load_trace(
            job.trace,
            batch=batch,
            sequence=job.seq,
            checkpointing=job.checkpointing,
            micro_batches=job.micro_batches,
            dtype=None if half else job.dtype,
        )
        if found.dtype == "fp32":
            if half:
                raise PstarError(
                    f"{job.trace}: --dtype {job.dtype}, but the trace is of fp32; trace the model in {job.dtype}"
                )
            return _optimized(found, job)
        return _optimized(retype(found, job.dtype or default_dtype(machine)), job)
    return _preset(job, machine, batch, True if job.checkpointing is None else job.checkpointing)


def _preset(job: OptionalWorkloadFlags, machine: Machine, batch: int | None, checkpointing: bool) -> Workload:
    if job.model is None:
        raise PstarError("give --trace FILE, or --model NAME with --batch and --seq")
    if batch is None or job.seq is None:
        missing = [flag for flag, value in (("--batch", batch), ("--seq", job.seq)) if value is None]
        raise PstarError(f"--model needs {' and '.join(missing)}")
    return preset(
        job.model,
        batch=batch,
        seq=job.seq,
        micro_batches=job.micro_batches or 1,
        dtype=job.dtype or default_dtype(machine),
        checkpointing=checkpointing,
        kernels=job.kernels,
        lora=lora_of(job.lora),
        optimizer=job.optimizer or "adamw",
    )


def _optimized(workload: Workload, job: OptionalWorkloadFlags) -> Workload:
    return workload if job.optimizer is None else with_optimizer(workload, job.optimizer)
