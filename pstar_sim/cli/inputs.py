"""From flags to values: the machine, the workload, the settings and the policies a command was asked about."""

from __future__ import annotations

import argparse

from pstar_sim.arguments import parse_bytes
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.planner.ranks import share_out, shares_of_batch
from pstar_sim.planner.variants import candidates
from pstar_sim.units import MIB
from pstar_sim.workload.lora import Adapter, adapter
from pstar_sim.workload.optimizers import with_optimizer
from pstar_sim.workload.presets import default_dtype, preset
from pstar_sim.workload.trace import load_trace, load_variants
from pstar_sim.workload.workload import Workload, retype

__all__ = ["lora_of", "machine_of", "settings_of", "variants_of", "workload_of", "workloads_of"]

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # numbers of micro-batches of a preset that a global batch may be cut in
MOST_SPLITS, LARGE_BATCH = (
    5,
    64,
)  # of them that are tried; those that make larger micro-batches only where no other does


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine named by --machine, with --nodes, --gpus, --gpu-memory, --host-memory and every --set over it."""
    if args.machine is None:
        raise PstarError("--machine is needed (see `pstar machines`)")
    return load_machine(
        args.machine,
        gpu_memory=args.gpu_memory,
        host_memory=args.host_memory,
        nodes=args.nodes,
        gpus=args.gpus,
        overrides=args.set,
    )


def settings_of(args: argparse.Namespace) -> Settings:
    chunk = parse_bytes(args.chunk) if args.chunk is not None else None
    if chunk is not None and chunk < MIB:
        raise PstarError(f"--chunk {args.chunk}: a chunk holds at least 1 MiB (128MiB is usual)")
    return Settings(update=args.update, clip=args.clip, chunk_bytes=chunk)


def lora_of(args: argparse.Namespace) -> Adapter | None:
    """The adapter of --lora: "r=16", "16", "r=8,targets=q_proj+v_proj". Raises PstarError for anything else."""
    if args.lora is None:
        return None
    try:
        return adapter(str(args.lora))
    except ModelError as error:
        raise PstarError(f"--{error}") from None


def workload_of(args: argparse.Namespace, machine: Machine) -> Workload:
    """One rank's job: see `workloads_of`; where ranks take different shares, one as hard as the hardest of theirs."""
    return share_out(workloads_of(args, machine), machine).workload


def workloads_of(args: argparse.Namespace, machine: Machine) -> tuple[Workload, ...]:
    """What each rank does: the variant of --trace that agrees with the flags given, or the preset --model with --batch
    and --seq. --batch is the batch of all GPUs together, of which each gets its share; a trace whose batch is not named
    is what one GPU does.

    Raises PstarError for flags that name no variant of the trace or more than one, for flags that are missing, and for
    a batch that the ranks cannot share.
    """
    if args.batch is None:
        return (_one_workload(args, machine, None),) * len(machine.ranks)
    shares = shares_of_batch(args.batch, machine)
    known = {share: _one_workload(args, machine, share) for share in sorted(set(shares))}
    return tuple(known[share] for share in shares)


def variants_of(args: argparse.Namespace, machine: Machine) -> tuple[Workload, ...]:
    """One rank's workloads, one for each way to run --global-batch that --trace holds and the other flags allow, or
    that the preset --model gives in SPLITS micro-batches.

    Raises PstarError for flags that leave none, and for ranks that take different shares.
    """
    if args.batch is not None or args.micro_batches is not None:
        raise PstarError("--global-batch chooses --batch and --micro-batches: give either it or them")
    shares = set(shares_of_batch(args.global_batch, machine))
    if len(shares) > 1:
        raise PstarError(f"the ranks of {machine.name} take different shares of a batch; give --batch instead")
    if args.trace is None:
        return _preset_variants(args, machine, shares.pop())
    known = load_variants(args.trace)
    found = [w for w in known if _agrees(w, args)]
    if not found:
        raise PstarError(
            f"{args.trace}: none of its {len(known)} variants agrees with --seq, --checkpointing and --dtype"
        )
    made = [w if w.dtype == "fp32" else retype(w, args.dtype or default_dtype(machine)) for w in found]
    return candidates([_optimized(w, args) for w in made], shares.pop())


def _agrees(w: Workload, args: argparse.Namespace) -> bool:
    """Whether a variant of a trace is what --seq, --checkpointing and --dtype ask for; the 16-bit types are alike."""
    if args.seq is not None and w.sequence != args.seq:
        return False
    if args.checkpointing is not None and w.checkpointing != args.checkpointing:
        return False
    return args.dtype is None or w.dtype == args.dtype or (args.dtype in ("bf16", "fp16") and w.dtype != "fp32")


def _preset_variants(args: argparse.Namespace, machine: Machine, share: int) -> tuple[Workload, ...]:
    """The preset in some of SPLITS micro-batches, with and without recomputation (unless --checkpointing says), and
    what becomes of these block by block."""
    choices = (True, False) if args.checkpointing is None else (args.checkpointing,)
    possible = [split for split in SPLITS if share % split == 0]
    splits = [split for split in possible if share // split <= LARGE_BATCH] or possible[-1:]
    made = [
        _preset(args, machine, share // split, checkpointing)
        for split in splits[:MOST_SPLITS]
        for checkpointing in choices
    ]
    return candidates(made, share)


def _one_workload(args: argparse.Namespace, machine: Machine, batch: int | None) -> Workload:
    adapter = lora_of(args)
    if args.trace is not None:
        if adapter is not None:
            raise PstarError("--lora is for presets (--model); trace the model with its adapters instead")
        half = args.dtype in ("bf16", "fp16")
        found = load_trace(
            args.trace,
            batch=batch,
            sequence=args.seq,
            checkpointing=args.checkpointing,
            micro_batches=args.micro_batches,
            dtype=None if half else args.dtype,
        )
        if found.dtype == "fp32":
            if half:
                raise PstarError(
                    f"{args.trace}: --dtype {args.dtype}, but the trace is of fp32; trace the model in {args.dtype}"
                )
            return _optimized(found, args)
        return _optimized(retype(found, args.dtype or default_dtype(machine)), args)
    return _preset(args, machine, batch, True if args.checkpointing is None else args.checkpointing)


def _preset(args: argparse.Namespace, machine: Machine, batch: int | None, checkpointing: bool) -> Workload:
    if args.model is None:
        raise PstarError("give --trace FILE, or --model NAME with --batch and --seq")
    if batch is None or args.seq is None:
        raise PstarError(f"--model needs {'--batch and ' if batch is None else ''}--seq")
    return preset(
        args.model,
        batch=batch,
        seq=args.seq,
        micro_batches=args.micro_batches or 1,
        dtype=args.dtype or default_dtype(machine),
        checkpointing=checkpointing,
        lora=lora_of(args),
        optimizer=args.optimizer or "adamw",
    )


def _optimized(workload: Workload, args: argparse.Namespace) -> Workload:
    return workload if args.optimizer is None else with_optimizer(workload, args.optimizer)
