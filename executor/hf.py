"""Hugging Face: runs `transformers.Trainer`, and trainers that build on it, by a plan.

A script that has a Trainer adds the line `offload(trainer, gpu_memory="24GB")`; `OffloadTrainerMixin` does the same for
a class of Trainers. When training begins, both capture the model with a batch of the trainer's own data, plan for this
machine, and prepare the model. `connect(trainer)` is for a model that the script itself has prepared.

[Note: clipping] A plain `Trainer` clips gradients between backward and `optimizer.step()`, through
`accelerator.clip_grad_norm_`. Under a plan they have left for their chunks by then, and `AdamW(max_grad_norm=)` clips
them inside `optimizer.step()`. `connect` checks that both clip at the same norm, and gives the Trainer the session's.
Without it, `trainer.train()` stops at its first clipping with a ContractError.

Checkpoints hold the folder `pstar` (`saving/checkpoint.py`), from which `trainer.train(resume_from_checkpoint=)`
continues bit-identically, under another plan too. They are plain checkpoints too: `optimizer.pt` has the moments a
second time, without which a plain Trainer silently begins with empty ones.

Tested with transformers 5.23 and accelerate 1.15. transformers is not imported before `connect` or `train`.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import logging
import math
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.describing import description_of
from executor.engine import Session
from executor.offloading import Request, begin, converted, form_seen, plan_for
from executor.optimizer import OffloadedOptimizer
from executor.saving.manifest import find_checkpoint, is_checkpoint
from executor.saving.plain_states import write_plain_states
from executor.session.spelling import TRAINER
from executor.trainer_capture import captured
from pstar_sim.catalog.machine import Machine
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.dtypes import DTYPES, MASTER
from pstar_sim.errors import CheckpointError, ContractError, DoesNotFit

__all__ = ["OffloadTrainerMixin", "connect", "offload", "trainers_offloaded"]

MIXED_PRECISION = {
    "no": None,
    **{dtype: dtype for dtype in DTYPES if dtype != MASTER},
}  # accelerate's word -> the plan's dtype
FOLDER = "pstar"
CHECKPOINT, OPTIMIZER, SCHEDULER, STATE = (
    "checkpoint",
    "optimizer.pt",
    "scheduler.pt",
    "trainer_state.json",
)  # Trainer's

log = logging.getLogger("executor")


def connect(trainer: Any) -> Any:
    """Make a `transformers.Trainer(model=prepared, optimizers=(optimizer, scheduler))` run by the plan. Returns the
    same trainer.

    Raises ContractError, naming the argument, where the Trainer's arguments contradict the plan: another
    `max_grad_norm`, `gradient_accumulation_steps` or `per_device_train_batch_size`; mixed precision by autocast (the
    plan is for the model's own dtype); checkpointing or compilation that the Trainer switches on;
    `load_best_model_at_end`.
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # after train(), accelerate has wrapped it
    if not isinstance(optimizer, OffloadedOptimizer):
        raise ContractError(
            f"executor.hf.connect: the Trainer's optimizer is {type(trainer.optimizer).__name__}; give it what "
            "executor.prepare returned: Trainer(model=model, optimizers=(optimizer, scheduler))"
        )
    session = optimizer.session
    if trainer.model is not session.model:
        raise ContractError(
            f"executor.hf.connect: the Trainer's model ({type(trainer.model).__name__}) is not the one its optimizer "
            "was prepared with; give the Trainer the model that executor.prepare returned"
        )
    if session.ranks is not None:
        raise ContractError(
            "executor.hf.connect: a Trainer of several processes is not supported; write the loop, or use "
            "`torchrun -m executor PLAN --model M`, for a plan of several ranks"
        )
    _check_arguments(trainer.args, session)
    kept = _join(trainer, optimizer)
    trainer._save_optimizer_and_scheduler = kept.save
    trainer._load_from_checkpoint = kept.check
    trainer._load_optimizer_and_scheduler = kept.load
    return trainer


def _join(trainer: Any, optimizer: OffloadedOptimizer) -> _RunFiles:
    accelerator = trainer.accelerator
    accelerator.device_placement = False  # else accelerate would copy the states to its device and back
    norm = _Norm(optimizer.session)
    accelerator.clip_grad_norm_ = norm.clip_grad_norm_
    accelerator.backward = _backward_of(accelerator.backward, weakref.ref(optimizer.session))
    if hasattr(trainer, "_has_mixed_mesh_grads"):  # transformers 5.2x reads p.grad there to choose how to clip
        trainer._has_mixed_mesh_grads = _one_mesh
    trainer.add_callback(_callback(norm))
    return _RunFiles(trainer, optimizer)


def _check_arguments(args: Any, session: Session) -> None:
    w = session.plan.workload
    wanted = args.max_grad_norm or None  # 0 switches the Trainer's clipping off
    if wanted != session.max_grad_norm:
        raise ContractError(
            f"TrainingArguments(max_grad_norm={args.max_grad_norm}) and AdamW(max_grad_norm={session.max_grad_norm}): "
            "gradients are clipped inside optimizer.step(), at AdamW's norm; give both the same norm (for no clipping "
            "0.0 to the Trainer and None to AdamW, with a plan made without clipping)"
        )
    accumulated = args.gradient_accumulation_steps
    if accumulated != w.micro_batches:
        raise ContractError(
            f"TrainingArguments(gradient_accumulation_steps={accumulated}), but the plan was made for "
            f"{w.micro_batches} micro-batches per iteration; make the plan for {accumulated} (--micro-batches)"
        )
    if args.per_device_train_batch_size != w.batch:
        raise ContractError(
            f"TrainingArguments(per_device_train_batch_size={args.per_device_train_batch_size}), but the plan was made "
            f"for batches of {w.batch}; make the plan for that batch (--batch)"
        )
    checkpointing = bool(getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", 0))
    if checkpointing and not w.checkpointing:
        raise ContractError(
            "TrainingArguments switch activation checkpointing on, but the plan was made without checkpointing; enable "
            "checkpointing in the model before planning, or plan with --checkpointing"
        )
    for name, why in (
        ("fp16", "loss scaling is AdamW(loss_scale=) here; load the model in float16 and plan for fp16"),
        ("bf16", "the plan is for the model's own dtype; load the model in bfloat16 and plan for bf16"),
        ("torch_compile", "the plan is for the model as it was captured; leave torch_compile out"),
        (
            "load_best_model_at_end",
            "weights alone cannot be loaded into a prepared model; load the best checkpoint afterwards",
        ),
    ):
        if getattr(args, name, False):
            raise ContractError(f"TrainingArguments({name}=True) on a prepared model: {why}")


class _RunFiles:
    """The Trainer itself would save copies of all states at once."""

    def __init__(self, trainer: Any, optimizer: OffloadedOptimizer) -> None:
        self._trainer = trainer
        self._optimizer = optimizer

    def save(self, output_dir: str) -> None:
        self._optimizer.save(Path(output_dir) / FOLDER)
        write_plain_states(self._optimizer, Path(output_dir) / OPTIMIZER)
        if self._trainer.args.should_save:
            torch.save(self._trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def check(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer calls this to load weights, which `load` brings back."""
        _require_states(resume_from_checkpoint, "resume_from_checkpoint")

    def load(self, checkpoint: str | None) -> None:
        """Raises CheckpointError, before anything changes."""
        if checkpoint is None:
            return
        self.check(checkpoint)
        path = Path(checkpoint) / SCHEDULER
        if not path.is_file():
            raise CheckpointError(f"resume_from_checkpoint: {path} is not there; give a whole checkpoint")
        try:
            scheduler = torch.load(path, weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"resume_from_checkpoint: {path} cannot be read ({type(error).__name__}); give a whole checkpoint"
            ) from error
        self._optimizer.load(Path(checkpoint) / FOLDER, generators=False)
        self._trainer.lr_scheduler.load_state_dict(scheduler)


def _backward_of(plain: Callable[..., Any], kept: weakref.ref[Session]) -> Callable[..., None]:
    """With the session's loss scale, in place of an earlier session's."""
    own = getattr(plain, "own", plain)

    def backward(loss: torch.Tensor, **more: Any) -> None:
        session = kept()
        with contextlib.nullcontext(loss) if session is None else session.scaled(loss) as scaled:
            own(scaled, **more)

    backward.own = own  # type: ignore[attr-defined]
    return backward


def _one_mesh(model: Any) -> bool:
    return False


class _Norm:
    """The Trainer asks for the global norm before `optimizer.step()`; the session knows it afterwards."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._pending_norm: torch.Tensor | None = None

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor | None:
        """`optimizer.step()` clips; the returned norm gets its value when the Trainer logs it."""
        wanted = None if math.isinf(max_norm) else float(max_norm)
        mine = self.session.max_grad_norm
        if norm_type != 2 or (wanted is not None and wanted != mine):
            raise ContractError(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) on a prepared model, whose step clips "
                f"the 2-norm at AdamW(max_grad_norm={mine}); use the same"
            )
        if mine is None:
            return None  # the session computes a norm only if it clips
        self._pending_norm = torch.full((), math.nan)
        return self._pending_norm

    def fill(self) -> None:
        norm = self.session.grad_norm
        if self._pending_norm is not None and norm is not None:
            self._pending_norm.fill_(norm)


def _callback(norm: _Norm) -> Any:
    from transformers import TrainerCallback

    class FillNorm(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Waiting for the norm of every step would delay the updates: logged steps get theirs."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_log:
                norm.fill()

    return FillNorm()


# -- a trainer that plans for itself ----------------------------------------------------------------------------------


def offload(
    trainer: Any,
    gpu_memory: str | int | None = None,
    *,
    device: str | None = None,
    machine: Machine | str = "here",
    policy: str = "optimal",
    masters: str | None = None,
    disks: Sequence[str | Path] = (),
    on_plan: Callable[[Plan], None] | None = None,
) -> Any:
    """Make a `transformers.Trainer`, or an instance of a subclass, train by a plan for this machine. Returns the same
    trainer.

    gpu_memory, device, machine, policy, masters, disks, on_plan: see `executor.offloading.Request`.

    `bf16` and `fp16` become the plan's dtype ([Note: mixed precision] in offloading.py). `max_grad_norm` and
    `gradient_accumulation_steps` become settings of the plan. `gradient_checkpointing` is captured with the model.
    `auto_find_batch_size` makes the batch smaller until a plan fits. `torch_compile` compiles the operations between
    the plan's moments, from the second step on: the first step is counted operator by operator. Raises ContractError,
    here or in `train()`, for DeepSpeed, FSDP, `nn.DataParallel` and optimizers that no plan has.
    """
    if not hasattr(trainer, "create_optimizer"):
        raise ContractError(
            f"executor.hf.offload: {type(trainer).__name__} is not a transformers.Trainer; give a Trainer, or "
            "use executor.offload for a loop of your own"
        )
    request = Request(
        gpu_memory=gpu_memory, device=device, machine=machine, policy=policy, masters=masters, disks=disks,
        on_plan=on_plan,
    )  # fmt: skip
    return _put_under(trainer, request)


def _put_under(trainer: Any, request: Request) -> Any:
    kind = type(trainer)
    if not isinstance(trainer, OffloadTrainerMixin):
        trainer.__class__ = type(f"Offloaded{kind.__name__}", (OffloadTrainerMixin, kind), {"__module__": __name__})
    trainer.offload_request = request
    return trainer


@contextlib.contextmanager
def trainers_offloaded(request: Request, on_end: Callable[[Session], None]) -> Iterator[list[weakref.ref[Session]]]:
    """Inside this context, every `transformers.Trainer` that trains is offloaded. Yields references to the sessions,
    which end with the context. transformers need not be imported yet: environment variables that a script sets before
    (`os.environ["HF_HOME"]`) take effect.

    on_end: called with the session of each training that has ended.
    """
    begun: list[weakref.ref[Session]] = []
    plain: dict[str, Any] = {}

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, OffloadTrainerMixin):
            _put_under(self, request)
        _begin_again(self)
        if self._offload is None and self.model is not None:
            _end_earlier(begun, self.model)
        try:
            done = plain["train"](self, _resumed_from(self, resume_from_checkpoint), *args, **kwargs)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(_left_behind(self)) from stop
        finally:
            if self._offload is not None:
                begun.append(weakref.ref(self.offload_session))
        on_end(self.offload_session)
        self.offload_session.state.trained = True
        return done

    def change(module: Any) -> None:
        for name, made in (("train", train), ("_move_model_to_device", OffloadTrainerMixin._move_model_to_device)):
            plain[name] = getattr(module.Trainer, name)
            setattr(module.Trainer, name, made)

    try:
        with _on_import("transformers.trainer", change):
            yield begun
    finally:
        for name, made in plain.items():
            setattr(sys.modules["transformers.trainer"].Trainer, name, made)
        for session in _alive(begun):
            session.close(restore=False)


def _left_behind(trainer: Any) -> str:
    folder = _last_whole(trainer.args.output_dir)
    left = (
        f"{folder} is whole: trainer.train(resume_from_checkpoint=True) continues from it"
        if folder
        else (f"{trainer.args.output_dir} has no checkpoint (see TrainingArguments(save_steps=))")
    )
    return f"after {trainer.state.global_step} steps; {left}"


def _alive(begun: Sequence[weakref.ref[Session]]) -> list[Session]:
    return [session for session in (ref() for ref in begun) if session is not None]


def _end_earlier(begun: Sequence[weakref.ref[Session]], model: nn.Module) -> None:
    """End earlier runs that share parameters with the model; those get their values back."""
    its = {id(p) for p in model.parameters()}
    for session in _alive(begun):
        if not its.isdisjoint(id(p) for p in session.model.parameters()):
            session.close()


@contextlib.contextmanager
def _on_import(name: str, then: Callable[[Any], None]) -> Iterator[None]:
    if name in sys.modules:
        then(sys.modules[name])
        yield
        return

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
            if fullname != name:
                return None
            sys.meta_path.remove(self)  # the search below then ends at the usual finders
            spec = importlib.util.find_spec(fullname)
            assert spec is not None and spec.loader is not None
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class OffloadTrainerMixin:
    """Makes a class of Trainers train by a plan for this machine: `class Mine(OffloadTrainerMixin, SFTTrainer)`. The
    mixin must be the first base.

    offload_request: memory, machine and policy of the plan; a class may have its own.
    """

    offload_request: Request = Request()
    _offload: _Joined | None = None

    @property
    def offload_session(self) -> Session:
        """The session of the run. Raises ContractError before `train()` has made it."""
        if self._offload is None:
            raise ContractError("offload_session: there is no session before train()")
        return self._offload.optimizer.session

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; `resume_from_checkpoint=True` continues from the last complete checkpoint."""
        _begin_again(self)
        done = super().train(_resumed_from(self, resume_from_checkpoint), *args, **kwargs)  # type: ignore[misc]
        self.offload_session.state.trained = True
        return done

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the Trainer's own optimizer, and return the plan's in its place."""
        super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        made: Any = self.optimizer  # type: ignore[has-type]  # a class of its own may return nothing
        if not isinstance(getattr(made, "optimizer", made), OffloadedOptimizer):
            self._offload = _begin(self, made)
            self.optimizer = made = self._offload.optimizer
        return made  # type: ignore[no-any-return]

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The plan decides where parameters are."""

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """An error or Ctrl-C during the save leaves no folder."""
        step = self.state.global_step  # type: ignore[attr-defined]
        folder = Path(self._get_output_dir(trial=trial)) / f"{CHECKPOINT}-{step}"  # type: ignore[attr-defined]
        if self.args.should_save:  # type: ignore[attr-defined]
            (folder / STATE).unlink(missing_ok=True)  # of an earlier run: written last
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        except BaseException:
            if self.args.should_save and not (folder / STATE).is_file():  # type: ignore[attr-defined]
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self._offload is not None
        self._offload.kept.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """A plain Trainer's; an offloaded one's are loaded later, with the states."""
        if _holds_states(resume_from_checkpoint):
            return
        if self._offload is not None:
            self._offload.kept.check(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _holds_states(checkpoint):
            absent = [name for name in (OPTIMIZER, SCHEDULER) if checkpoint and not (Path(checkpoint) / name).is_file()]
            if absent:
                log.warning(
                    "%s has no %s: moments and learning rate begin anew, as under a plain Trainer, which does not say "
                    "so; give a checkpoint with states (not with save_only_model) to continue",
                    checkpoint,
                    " and no ".join(absent),
                )
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif self._offload is not None:
            self._offload.kept.load(checkpoint)
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if checkpoint is not None and best is not None and self.args.load_best_model_at_end:  # type: ignore[attr-defined]
            _require_states(best, "load_best_model_at_end")

    def _load_best_model(self) -> None:
        assert self._offload is not None
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        _require_states(best, "load_best_model_at_end")
        self._offload.optimizer.load(Path(best) / FOLDER, generators=False)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights as the Trainer does. Every rank reads the weights; the first writes them."""
        if self._offload is None or self._offload.optimizer.session.ranks is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        weights = self.model.state_dict()  # type: ignore[attr-defined]
        args = self.args  # type: ignore[attr-defined]
        if args.should_save:
            self._save(args.output_dir if output_dir is None else output_dir, state_dict=weights)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Joined:
    optimizer: OffloadedOptimizer
    kept: _RunFiles


def _begin_again(trainer: Any) -> None:
    """The run continues or, if it has ended, a new one is planned."""
    if trainer._offload is None:
        return
    session = trainer.offload_session
    session.state.trained = False
    if session.closed:
        trainer._offload = trainer.optimizer = trainer.lr_scheduler = None


def _resumed_from(trainer: Any, asked: Any) -> Any:
    return (_last_whole(trainer.args.output_dir) or True) if asked is True else asked


def _last_whole(output_dir: str) -> str | None:
    folders = {int(path.name.rpartition("-")[2]): path for path in Path(output_dir).glob(f"{CHECKPOINT}-*")
               if path.name.rpartition("-")[2].isdigit()}  # fmt: skip
    for _, path in sorted(folders.items(), reverse=True):
        if (path / STATE).is_file():
            return str(path)
        log.warning("%s is not whole (no %s): an earlier checkpoint is looked for", path, STATE)
    return None


def _holds_states(checkpoint: str) -> bool:
    """Raises CheckpointError where an offloaded Trainer's states are incomplete."""
    folder = Path(checkpoint) / FOLDER
    whole = is_checkpoint(find_checkpoint(folder))
    if folder.exists() and not whole:
        _require_states(checkpoint, "resume_from_checkpoint")
    return whole


def _require_states(checkpoint: str | Path, asked: str) -> None:
    if not is_checkpoint(find_checkpoint(Path(checkpoint) / FOLDER)):
        raise CheckpointError(
            f"{asked}: {checkpoint} has no whole folder {FOLDER!r}; give a checkpoint that an offloaded or "
            "connected Trainer saved (not with save_only_model)"
        )


def _begin(trainer: Any, optimizer: torch.optim.Optimizer) -> _Joined:
    """Raises DoesNotFit if no plan fits, under `auto_find_batch_size` as an out-of-memory RuntimeError: the Trainer
    then tries a smaller batch."""
    args, request, model = trainer.args, trainer.offload_request, trainer.model
    _require_alone(trainer)
    _check_evaluation(args)
    norm = args.max_grad_norm or None  # 0 switches the Trainer's clipping off
    spec = description_of(model, optimizer, max_grad_norm=norm)
    dtype = _dtype_of(trainer)
    model.to("cpu")  # the Trainer has put the model on the GPU, which the plan's chunks will need
    try:
        with converted(model, dtype) as masters:
            _cast_as_before(trainer)
            model.train()
            with form_seen(model) as form:
                workload = captured(trainer, spec, dtype)
            settings = Settings(clip=norm is not None)
            plan = plan_for(workload, request, micro_batches=args.gradient_accumulation_steps, settings=settings)
            offloaded = begin(
                model, plan, spec, request, optimizer=optimizer, masters=masters, spelling=TRAINER,
                count=_each_rank_the_same, form=form[0],
            )  # fmt: skip
    except DoesNotFit as error:
        if args.auto_find_batch_size:
            raise RuntimeError(f"a batch of {trainer._train_batch_size}: out of memory. {error}") from error
        raise
    return _Joined(offloaded, _join(trainer, offloaded))


def _each_rank_the_same(args: Any, kwargs: Any) -> float:
    """The Trainer's loss is for gradients averaged over the processes."""
    return 1.0


def _require_alone(trainer: Any) -> None:
    for name, system in (("is_deepspeed_enabled", "DeepSpeed"), ("is_fsdp_enabled", "FSDP")):
        if getattr(trainer, name, False):
            raise ContractError(f"the Trainer runs under {system}, which moves the model itself; leave {system} out")
    if trainer.args.n_gpu > 1:
        raise ContractError(
            f"the Trainer has {trainer.args.n_gpu} GPUs in one process (nn.DataParallel); start one process per GPU "
            "with torchrun or accelerate launch, or leave one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )


def _check_evaluation(args: Any) -> None:
    if args.load_best_model_at_end and args.save_only_model:
        raise ContractError(
            "TrainingArguments(load_best_model_at_end=True, save_only_model=True): the best weights come back with "
            "their states; leave save_only_model out, or load the best checkpoint into a model of its own afterwards"
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(args, name):
            raise ContractError(
                f"TrainingArguments({name}=True) would convert a prepared model; leave it out: evaluation runs in the "
                "plan's dtype"
            )


def _dtype_of(trainer: Any) -> str | None:
    word: str = trainer.accelerator.mixed_precision
    if word not in MIXED_PRECISION:
        raise ContractError(f"mixed precision {word!r} is not supported by a plan; use bf16=True or fp16=True")
    return MIXED_PRECISION[word]


def _cast_as_before(trainer: Any) -> None:
    """The capture has to see accelerate's autocast (and compiled model), but never DistributedDataParallel."""
    accelerator, model = trainer.accelerator, trainer.model
    accelerator.scaler = None  # the session scales the loss: AdamW(loss_scale=)
    plain = accelerator.prepare_model
    ready = getattr(trainer, "_offload_ready", None)
    if ready is not None and ready[0] is model:
        return
    run = plain(model, device_placement=False, evaluation_mode=True)
    if run is not model:  # a compiled model is wrapped; the Trainer clears gradients through the wrapper
        run.__dict__["zero_grad"] = lambda set_to_none=True: model.zero_grad(set_to_none)
    trainer._offload_ready = model, run

    def prepare_model(other: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return run if other is model else plain(other, *args, **kwargs)  # type: ignore[no-any-return]

    accelerator.prepare_model = prepare_model
