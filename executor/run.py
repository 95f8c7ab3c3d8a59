"""A training job by name, as `pstar run`, the demo and the benchmarks run it: on plan and in plain PyTorch, with checks
before and a clean end in every case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from executor.compatibility import check_optimizer, check_processes
from executor.descriptions import DESCRIPTIONS, AdamW, Optimizer
from executor.devices.cuda import CudaBackend, cuda_device
from executor.devices.opening import is_cuda
from executor.measuring.first import TideReport
from executor.measuring.measured import Measured, with_tide
from executor.measuring.status import Status
from executor.models import BuiltModel, build, map_batch, named_failures
from executor.optimizer import OffloadedOptimizer
from executor.prepare import prepare
from executor.recording.record import record
from executor.running.data import ByteText, batches_like, open_data
from executor.running.keeping import Keeping
from executor.running.processor import ProcessorTime, taken_by_others
from executor.running.shared_run import SharedRun, own_batches, share_results
from executor.running.step_log import StepLog
from executor.running.stopping import stop_on_sigterm
from executor.saving.generators import seed_generators
from executor.training import StepReport, train, train_step
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan
from pstar_sim.core.timeline import Timeline
from pstar_sim.errors import PlanError
from pstar_sim.workload.axes import Axes
from pstar_sim.workload.workload import Workload

__all__ = ["Keeping", "RunResult", "TrainingJob", "check_device", "check_hardware", "recording_machine"]

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """timeline: of the last timed iterations; None if the last left the plan. Its tide is measured where there is
        `measured`, else the plan's at measured times.
    measured: bytes of one untimed iteration in the predicted order of events, if requested.
    deviations: how the run left the plan.
    plan: the last one.
    tide: of the first iteration, beside the plan's.
    notes: where weights came from, and the checkpoint that the run continued.
    shared: figures of all ranks; None on one rank.
    taken_by_others: processor time of other programs during the steps, 0 to 1; None where it cannot be measured.
    """

    reports: Sequence[StepReport]
    timeline: Timeline | None
    measured: Measured | None
    deviations: Sequence[str]
    plan: Plan
    tide: TideReport | None = None
    notes: Sequence[str] = ()
    shared: SharedRun | None = None
    taken_by_others: float | None = None


def check_device(plan: Plan, device: str) -> None:
    """Raise PlanError for a plan for several processes, for other hardware, or not from a trace of a module."""
    check_processes(plan, 1)
    check_hardware(plan, device)


def check_hardware(plan: Plan, device: str) -> None:
    """For any number of ranks."""
    if plan.workload.products:
        raise PlanError(
            f"the plan has products in {plan.workload.products}, which are planned only; plan without --products"
        )
    if is_cuda(device):
        cuda_device(device)
    elif device != "virtual":
        raise PlanError(f"device {device!r} is not known; use --device virtual, cuda or cuda:N")
    if device == "virtual" and plan.machine.gpu.name != "virtual":
        raise PlanError(
            f"the plan was made for machine {plan.machine.name!r} (GPU {plan.machine.gpu.name}), not for the virtual "
            "accelerator; plan with --machine virtual --gpu-memory SIZE, or with the machine file that --record wrote"
        )
    if plan.workload.autocast:
        raise PlanError(
            f"the plan is for {plan.workload.model!r} under autocast, which `pstar run` does not enter; run it in your "
            "own loop, whose loss is under torch.autocast (executor.prepare)"
        )
    if plan.workload.source == "preset":
        adapters = any(tensor.frozen for tensor in plan.workload.tensors)
        raise PlanError(
            f"the plan was made from the preset {plan.workload.model!r}, whose moments are not a module's; trace the "
            "model first (pstar trace MODEL -o FILE) and plan with --trace FILE"
            + "; MODEL is py:MODULE:FACTORY for a model with adapters"
            * adapters
        )


def recording_machine(device: str, machine: Machine | None, gpu_memory_bytes: int | None) -> Machine:
    """The machine whose GPU budget a warm-up keeps: `machine`, or the virtual accelerator's figures with the given
    memory, on CUDA with the card's name and, by default, its memory less the room that a run keeps
    (devices/headroom.py)."""
    if not is_cuda(device):
        if device != "virtual":
            raise PlanError(f"device {device!r} is not known; use --device virtual, cuda or cuda:N")
        base = machine or load_machine("virtual")
        return base if gpu_memory_bytes is None else load_machine("virtual", gpu_memory=gpu_memory_bytes)
    where = cuda_device(device)
    backend = CudaBackend(where, limit_bytes=gpu_memory_bytes)
    try:
        available, plannable = backend.available_gpu_bytes(), backend.plannable_gpu_bytes()
    finally:
        backend.close()
    assert available is not None
    if machine is not None and machine.gpu_budget_bytes <= available:
        return machine
    plannable -= plannable // 64  # for the slack between exchanges, see cuda_blocks.py
    if plannable < 1:
        raise PlanError(f"{device} has no memory left for a plan: {backend.kept}; free memory on the card")
    made = load_machine("virtual", gpu_memory=plannable)
    return replace(made, name=machine.name if machine is not None else torch.cuda.get_device_name(where))


def on_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    if device.type == "cpu":
        return batches
    return (map_batch(one, lambda tensor: tensor.to(device, non_blocking=True)) for one in batches)


@dataclass(frozen=True, kw_only=True)
class TrainingJob(Axes):
    """model: as for `pstar trace`.
    data: "text:FOLDER", a folder of text files; None: the source of the Python standard library.
    weights: folder with the model's values; None: initialised by the seed.
    seed: of weights, data, and the global random number generators.
    """

    model: str
    batch: int
    sequence: int
    micro_batches: int = 1
    data: str | None = None
    lr: float = 3e-4
    seed: int = 0
    clip: bool = True
    weights: str | None = None

    @classmethod
    def of_plan(
        cls, plan: Plan, model: str, *, data: str | None, lr: float, seed: int, weights: str | None = None
    ) -> TrainingJob:
        """A plan that chooses for each block turns off the model's checkpointing. A factory's model of several dtypes
        keeps them."""
        w = plan.workload
        mixed = model.startswith("py:") and len({t.dtype for t in w.tensors}) > 1
        return cls(
            model=model,
            batch=w.batch,
            sequence=w.sequence,
            dtype=None if mixed else w.dtype,
            checkpointing=w.checkpointing and not w.activations,
            micro_batches=w.micro_batches,
            data=data,
            lr=lr,
            seed=seed,
            clip=plan.settings.clip,
            weights=weights,
        )

    def build(self, *, empty: bool = False) -> BuiltModel:
        """With real weights, the same for the same seed."""
        return build(
            self.model,
            batch=self.batch,
            sequence=self.sequence,
            device="cpu",
            seed=self.seed,
            empty=empty,
            **self.given,
        )

    def batches(self, built: BuiltModel, *, text: ByteText | None = None, skip: int = 0) -> Iterator[Any]:
        """Endless, the same for the same seed.

        skip: sequences drawn before.
        """
        text = open_data(self.data) if text is None else text
        return batches_like(built.example_batch, text, vocabulary=built.vocabulary, seed=self.seed, skip=skip)

    def record(
        self, machine: Machine, *, device: str = "virtual", gpu_memory: int | None = None, group: Any = None
    ) -> Workload:
        """Of a real warm-up iteration, within the GPU budget of `machine`.

        gpu_memory: as for `prepare`.
        group: as for `recording.record`.
        """
        if is_cuda(device):
            machine = recording_machine(device, machine, gpu_memory)
        built = self.build(empty=self.weights is not None)
        batches = self.batches(built)
        with named_failures(self.model, built.module):
            return record(
                built.module,
                [next(batches) for _ in range(self.micro_batches)],
                machine,
                name=self.model,
                device=device,
                gpu_memory=gpu_memory if is_cuda(device) else None,
                batch=self.batch,
                sequence=self.sequence,
                optimizer=AdamW(lr=self.lr, max_grad_norm=MAX_GRAD_NORM if self.clip else None),
                weights=self.weights,
                group=group,
            )

    def run(
        self,
        plan: Plan,
        *,
        steps: int,
        device: str = "virtual",
        bandwidth: tuple[float | None, float | None] | None = None,
        gpu_memory: int | None = None,
        order: Callable[[Plan], Timeline] | None = None,
        keeping: Keeping | None = None,
        on_step: Callable[[StepReport, Status], None] | None = None,
        logs: Sequence[str] = (),
        disks: Sequence[str] = (),
    ) -> RunResult:
        """Train by the plan, and measure.

        steps: with those before the checkpoint.
        bandwidth, gpu_memory, disks: as for `prepare`.
        order: predicts a plan's timeline; with it, one more iteration runs untimed in the predicted order, to measure
            bytes.
        logs: targets of a row per step (`running.step_log.open_sink`); a job that goes on adds to a file's rows.

        With `keeping.save`, SIGTERM ends the run after the current step: a checkpoint is saved, and Stopped raised. The
        session is always closed; errors pass through.
        """
        check_hardware(plan, device)
        keeping = keeping or Keeping()
        text = open_data(self.data)
        data = {"corpus": text.digest, "seed": self.seed, "sequence": self.sequence, "model": self.model}
        at = keeping.begin(steps=steps, data=data, empty=self.weights is not None)
        built = self.build(empty=at.empty or (keeping.resume is not None and not self.model.startswith("py:")))
        batches = self.batches(built, text=text, skip=at.sequences)
        model, optimizer = prepare(
            built.module,
            plan,
            self._optimizer(plan),
            device=device,
            bandwidth=bandwidth,
            gpu_memory=gpu_memory,
            disks=disks,
            weights=keeping.weights or self.weights,
        )
        session = optimizer.session
        batches = own_batches(on_device(batches, session.backend.device), session)
        each = plan.workload.micro_batches * built.batch * plan.machine.data_parallel_size

        def standing(done: int) -> dict[str, Any]:
            return {"data": data, "sequences": at.sequences + (done - at.steps) * each, "empty": at.empty}

        log: StepLog | None = None

        def report_step(report: StepReport) -> None:
            if on_step is not None or log is not None:
                status = session.status()
                if log is not None:
                    log.write(step=report.step, loss=report.loss, time_s=report.time_s, status=status)
                if on_step is not None:
                    on_step(report, status)

        with contextlib.ExitStack() as last:
            last.callback(session.close, restore=False)
            stop = last.enter_context(stop_on_sigterm(listens=keeping.save is not None))
            rank = 0 if session.ranks is None else session.ranks.rank
            seed_generators(self.seed + rank)  # a checkpoint has those of its ranks
            keeping.load(optimizer)
            if logs:
                log = last.enter_context(StepLog(optimizer, *logs, append=at.steps > 0))
            after = keeping.saving(optimizer, last=steps - 1, extra=standing, on_step=report_step, stop=stop)
            before = ProcessorTime.now()
            with named_failures(self.model, model):
                reports = train(
                    model,
                    optimizer,
                    batches,
                    steps=steps - at.steps,
                    micro_batches=plan.workload.micro_batches,
                    first=at.steps,
                    on_step=after,
                )
            session.drain()
            others = taken_by_others(before, ProcessorTime.now())
            sent_bytes = 0 if session.ranks is None else session.ranks.wire.sent_bytes
            timeline, measured = _look_back(model, optimizer, batches, plan.workload.micro_batches, order)
            return RunResult(
                reports=reports,
                timeline=timeline,
                measured=measured,
                deviations=tuple(session.deviation_log),
                plan=session.plan,
                tide=session.status().tide,
                notes=tuple(note for note in (at.note or session.weights_note, self._unread(keeping)) if note),
                shared=share_results(session, reports, measured, sent_bytes),
                taken_by_others=others,
            )

    def _unread(self, keeping: Keeping) -> str:
        if keeping.weights is None or self.weights is None:
            return ""
        return f"{self.weights} was not read: the weights are the checkpoint's"

    def run_plain(self, plan: Plan, *, steps: int) -> list[StepReport]:
        """The same steps in plain PyTorch on one thread: torch's fused optimizer, and `clip_grad_norm_`. Without fp32
        masters a bf16 job's losses agree only roughly. Raises PlanError for an optimizer that torch does not have."""
        built = self.build()
        parameters = list(built.module.parameters())
        optimizer = self._optimizer(plan).plain(parameters)
        if plan.settings.clip:

            def clip(*_: Any) -> None:
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)

            optimizer.register_step_pre_hook(clip)
        torch.set_num_threads(1)
        seed_generators(self.seed)
        return train(
            built.module,
            optimizer,
            self.batches(built),
            steps=steps,
            micro_batches=plan.workload.micro_batches,
        )

    def _optimizer(self, plan: Plan) -> Optimizer:
        check_optimizer(plan)
        return DESCRIPTIONS[plan.workload.optimizer.name](
            lr=self.lr,
            max_grad_norm=MAX_GRAD_NORM if plan.settings.clip else None,
            eager=plan.settings.update == "eager",
        )


def _look_back(
    model: nn.Module,
    optimizer: OffloadedOptimizer,
    batches: Iterator[Any],
    micro_batches: int,
    order: Callable[[Plan], Timeline] | None,
) -> tuple[Timeline | None, Measured | None]:
    """The timeline of the last iterations, and the measured bytes of one more; (None, None) if the last left the
    plan."""
    session = optimizer.session
    if not any(log.on_plan for log in list(session.steps.logs)[-1:]):
        return None, None
    timeline = session.timeline()
    if order is None and session.ranks is None:
        return timeline, None
    # Drawn before the count: the corpus lies in host memory and does not count for the accelerator.
    drawn = iter([next(batches) for _ in range(2 * micro_batches)])
    measured = session.measure_iteration(
        lambda: train_step(model, optimizer, drawn, micro_batches), None if order is None else order(session.plan)
    )
    return with_tide(timeline, measured) if measured.on_plan else timeline, measured
