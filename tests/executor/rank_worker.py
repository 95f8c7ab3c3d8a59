"""A few processes that train cases given as JSON on several ranks and write what came of each. Started by
test_several_ranks.py: `python rank_worker.py PROCESSES FOLDER LIMIT_S`, cases in FOLDER/cases.json, results in
FOLDER/NAME.RANK.json.

Everything is imported once and then forked. Each case trains on the first `ranks` processes; rank 0 trains the plain
reference on the joined batches and compares parameters and both moments of every tensor.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import random
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import apart
import conftest as kit
import torch
import torch._dynamo  # torch's optimizers import it when the first is made: here once, before the fork
import torch.distributed as dist

import executor
from pstar_sim.catalog.machine import Fabric, Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit, PstarError
from pstar_sim.policy.family.attempt import attempt
from pstar_sim.policy.family.course import Knobs
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.points import Point
from pstar_sim.policy.kit.schedule import Modes
from pstar_sim.policy.passes.parts import in_parts
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.workload.mixing import block_names, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

LR, EPS = 1e-3, 1e-3
"""eps is large beside torch's 1e-8: with that, Adam turns the last bits of a gradient that is zero but for rounding
(the bias of attention keys) into a step of lr either way, and a gradient twice as large into the same step."""
SHARES = (0.25, 0.4, 0.55, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 12.0)


def machine_of(gpu_bytes: int, ranks: int, sequences: list[int] | None = None) -> Machine:
    one = kit.small_machine(gpu_bytes)
    peer = Fabric(name="test", bytes_per_s=2e9, latency_s=1e-5, measured=False, source="test")
    taken = sequences or [1] * ranks
    several = [replace(one.ranks[0], batch_share=n / sum(taken)) for n in taken]
    return replace(one, ranks=tuple(several), peer=peer)


def tight_plan(
    policy: str,
    w: Workload,
    settings: Settings,
    ranks: int,
    sequences: list[int] | None = None,
    host_share: float | None = None,
) -> Plan:
    """host_share: host memory, as a share of fp32 parameters and states; None: enough."""
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    for share in SHARES:
        try:
            machine = machine_of(w.peak_non_model_bytes + int(share * params), ranks, sequences)
            if host_share is not None:
                host_bytes = machine.host.reserved_bytes + int(host_share * 4 * params)
                machine = replace(machine, host=replace(machine.host, memory_bytes=host_bytes))
            machine = replace(machine, nvme=None if host_share is None and "nvme" not in policy else kit.DISKS)
            return find_policy(policy)(w, machine, settings)
        except DoesNotFit:
            continue
    raise AssertionError(f"{policy} fits nowhere")


def summed_plan(w: Workload, settings: Settings, ranks: int, *, spill: bool) -> Plan:
    """The tightest plan in which every other chunk's gradients add up on the GPU, and chunks are in turn updated on the
    CPU, streamed and pinned. spill: whether these sums leave between two micro-batches."""
    params = sum(t.bytes for t in w.tensors if t.tied_to is None)
    for share in SHARES:
        machine = machine_of(w.peak_non_model_bytes + int(share * params), ranks)
        job = Job("by hand", w, machine, replace(settings, chunk_bytes=2048), Point(streams=True, sums=True))
        turns = [frozenset(job.candidates[n::3]) for n in (1, 2)]
        summed = frozenset(job.candidates[::2]) - turns[1]
        modes = Modes(turns[1], turns[0], summed, summed if spill else frozenset())
        try:
            made = attempt(job, modes, Knobs())
        except DoesNotFit:
            continue
        if made.course.least_room_bytes >= 0 and made.window.stuck is None:
            return made.plan()
    raise AssertionError("fits nowhere")


def settings_of(case: dict[str, Any]) -> Settings:
    update = "eager" if case.get("eager") else "step"
    return Settings(update=update, clip=case.get("clip") is not None, effort=kit.LITTLE_EFFORT)


@functools.cache
def workload_of(name: str, checkpointing: bool) -> Workload:
    """Of one micro-batch."""
    model, draw = kit.build(name, checkpointing=checkpointing, seed=0)
    example = draw(torch.Generator().manual_seed(9))
    if name != "experts":
        return kit.workload_of(model, example)
    spec = executor.AdamW(lr=LR)  # fake tensors cannot route
    return executor.record(
        model, [example], kit.small_machine(10**9), name="experts", optimizer=spec, loss=kit.loss_of, timed=0,
        batch=4, sequence=1,
    )  # fmt: skip


def plan_of(case: dict[str, Any]) -> Plan:
    w = workload_of(case.get("model", "mlp-4"), case.get("checkpointing", False))
    if "offload" in case:
        w = offload_blocks(w, [block_names(w)[n] for n in case["offload"]])
    w = repeat_micro_batch(w, case.get("micro_batches", 1))
    if "spill" in case:
        return summed_plan(w, settings_of(case), case["ranks"], spill=case["spill"])
    plan = tight_plan(case["policy"], w, settings_of(case), case["ranks"], case.get("sequences"))
    if "parts" not in case:
        return plan
    parted = in_parts(plan, {c.index: case["parts"] for c in plan.layout.chunks})
    assert len(parted.steps) > len(plan.steps)
    return replace(parted, predictions={})


def plans_of(cases: list[dict[str, Any]]) -> list[Plan]:
    """Made in another process: one that ran a backward on fake tensors cannot be forked and train, where torch is built
    for CUDA."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(plan_of, cases))


def streams_of(rank: int, most_s: float = 4e-4) -> executor.VirtualStreams:
    """Asynchronous streams with random delays, others on each rank."""
    rng = random.Random(rank)
    return executor.VirtualStreams(delays=lambda queue: rng.random() * most_s if rng.random() < 0.5 else 0.0)


def moved(batch: dict[str, torch.Tensor], place: torch.device) -> dict[str, torch.Tensor]:
    return {name: value.to(place) for name, value in batch.items()}


def train(case: dict[str, Any], plan: Plan, rank: int, group: Any) -> dict[str, Any]:
    ranks, micro_batches, steps = case["ranks"], case.get("micro_batches", 1), case.get("steps", 2)
    clip, eager = case.get("clip"), case.get("eager", False)
    model, draw = kit.build(case.get("model", "mlp-4"), checkpointing=case.get("checkpointing", False), seed=0)
    twin = copy.deepcopy(model)
    if rank:  # the others' values must not matter
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    spec = executor.AdamW(lr=LR, eps=EPS, weight_decay=0.1, max_grad_norm=clip, eager=eager)
    backend = streams_of(rank) if case.get("streams") else None
    device = f"cuda:{rank}" if case.get("cuda") else "virtual"
    place = torch.device(device if case.get("cuda") else "cpu")
    model, optimizer = executor.prepare(
        model, plan, spec, group=group, watchdog_s=5.0, backend=backend, device=device, disks=[sys.argv[2]]
    )
    session = optimizer.session
    generator = torch.Generator().manual_seed(1)
    reference = kit.Reference(twin, LR, 0.1, clip, eps=EPS)
    evaluations = []
    for _ in range(steps):
        if case.get("evaluate"):
            with torch.no_grad():
                batch = draw(torch.Generator().manual_seed(2))
                pair = float(kit.loss_of(model, moved(batch, place))), float(kit.loss_of(twin, batch))
                evaluations.append(abs(pair[0] / pair[1] - 1) if rank == 0 else 0.0)
        for _ in range(micro_batches):
            batches = [draw(generator) for _ in range(ranks)]
            if "sequences" in case:  # of each rank; the plan is for the largest
                batches = [{k: v[:n] for k, v in b.items()} for b, n in zip(batches, case["sequences"])]
            (kit.loss_of(model, moved(batches[rank], place)) / micro_batches).backward()
            if rank == 0:
                joined = {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
                (kit.loss_of(twin, joined) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without a backward: nothing happens, on whatever this rank left out
        if rank == 0:
            reference.step()
            reference.optimizer.zero_grad()
    result: dict[str, Any] = {
        "evaluations": evaluations,
        "deviations": list(session.deviation_log),
        "kinds": sorted({s.kind for s in plan.steps}),
    }
    if not case.get("evaluate"):  # an evaluation moves chunks without steps
        session.drain()
        logged, booked = kit.byte_changes(session)
        result["renamed"] = [str(row) for row in ((logged - booked) + (booked - logged)).elements()]
    values = {n: v.clone() for n, v in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    if rank == 0:
        named = [(n, p) for n, p in twin.named_parameters()]
        kept = reference.optimizer.state_dict()["state"]
        result["parameters"] = max(
            # of the largest element, or of one step where that is less (biases begin at 0)
            float((values[n] - p.detach()).abs().max()) / max(float(p.detach().abs().max()), LR)
            for n, p in named
        )
        assert all(states[i]["step"] == kept[i]["step"] for i in kept) and set(states) == set(kept)
        for key in ("exp_avg", "exp_avg_sq"):
            result[key] = max(kit.distance(states[i][key], kept[i][key]) for i in kept)
    # bytes and times of a device: tests/backends/test_cuda_memory.py; on streams, and where each rank leaves experts
    # out, the bytes are not the plan's
    if case.get("cuda") or case.get("streams") or case.get("model") == "experts":
        session.close(restore=False)
        return result
    predicted = play(plan)
    sequences = case["sequences"][rank] if "sequences" in case else None
    measured = session.measure_iteration(lambda: one_step(model, optimizer, draw, micro_batches, sequences), predicted)
    result["peak"] = [measured.peak_gpu_bytes, predicted.peak_bytes["gpu"]]
    result["host"] = [measured.peak_host_bytes, predicted.peak_bytes["host"]]
    result["transient"] = [
        session.arena.payloads.peak_transient_bytes,
        max(plan.layout.payload_bytes(c.index, "param") for c in plan.layout.chunks),
    ]
    result["layout_ranks"] = plan.layout.ranks
    session.close(restore=False)
    return result


def one_step(model: Any, optimizer: Any, draw: Any, micro_batches: int, sequences: int | None) -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(micro_batches):
        batch = draw(generator)
        if sequences is not None:
            batch = {k: v[:sequences].clone() for k, v in batch.items()}
        kit.loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    processes, folder = int(sys.argv[1]), Path(sys.argv[2])
    cases = json.loads((folder / "cases.json").read_text())
    plans = dict(zip([case["name"] for case in cases], plans_of(cases)))
    for name in {case.get("model", "mlp-4") for case in cases}:
        kit.build(name)  # imports what it needs, before the fork
    gc.freeze()  # what was imported: no process goes through it when it ends
    rank = 0
    children = []
    for other in range(1, processes):
        child = os.fork()
        if child == 0:
            rank = other
            children = []
            break
        children.append(child)
    faulthandler.dump_traceback_later(int(sys.argv[3]), exit=True)  # no process is left behind, whatever happens
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    groups = {n: dist.new_group(list(range(n))) for n in sorted({case["ranks"] for case in cases})}
    for case in cases:
        if rank >= case["ranks"]:
            continue
        try:
            group, plan = groups[case["ranks"]], plans[case["name"]]
            if "apart" in case:
                backend = streams_of(rank) if case.get("streams") else None
                result = apart.train(case, plan, rank, group, backend)
            else:
                result = train(case, plan, rank, group)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
            if not isinstance(error, PstarError) or os.environ.get("RANK_TRACE"):
                traceback.print_exc()
            (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(result))
            break
        (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(result))
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
