"""The scripts of `scripts/` run as they are, offloaded, and with the reference written out; what the three did.

The reference is plain torch: parameters in 16 bits, fp32 masters made from the values that the script loaded, each
micro-batch's gradients cast to fp32 and summed in fp32, clipping by torch's own function, and
torch.optim.AdamW(fused=True).
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

import executor
from executor.hf import offload
from pstar_sim.core.plan import Plan

SCRIPTS = Path(__file__).parent / "scripts"
OF_A_TRAINER = ("trainer_bf16", "trl_sft", "trl_dpo_lora", "trl_sft_qlora")
NAMES = (*OF_A_TRAINER, "plain_loop", "lightning_module")


class WrittenOut(torch.optim.AdamW):
    """AdamW over fp32 masters of a model that computes in 16 bits."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype, max_grad_norm: float | None
    ) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self.initial: dict[str, torch.Tensor] = {}
        self.max_grad_norm = max_grad_norm
        self.working: dict[nn.Parameter, nn.Parameter] = {}
        groups = []
        for group in optimizer.param_groups:
            masters = [self._master(p, names[id(p)]) for p in group["params"]]
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": masters, "fused": True})
        stays = {id(p) for part in model.modules() if isinstance(part, _NormBase) for p in part.parameters()}
        for p in model.parameters():
            if (
                p.is_floating_point() and id(p) not in stays
            ):  # kernels of batch norms want the dtype of their running statistics
                p.data = p.data.to(dtype)
        for master, p in self.working.items():
            p.register_post_accumulate_grad_hook(self._summed_into(master))
        super().__init__(groups, fused=True)
        masters_of = {id(p): master for master, p in self.working.items()}
        self.in_order = [masters_of[id(p)] for p in model.parameters() if id(p) in masters_of]  # as a norm is taken
        self.scheduled = optimizer.param_groups

    def _master(self, p: nn.Parameter, name: str) -> nn.Parameter:
        master = nn.Parameter(p.detach().clone().float())
        self.working[master], self.initial[name] = p, p.detach().clone().float()
        return master

    @staticmethod
    def _summed_into(master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def add(p: torch.Tensor) -> None:
            gradient = p.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            p.grad = None

        return add

    def step(self, closure: Any = None) -> Any:
        for mine, theirs in zip(self.param_groups, self.scheduled, strict=True):
            if "initial_lr" in theirs:  # a scheduler that was made with the script's own optimizer
                mine |= {name: theirs[name] for name in ("lr", "betas", "weight_decay")}
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.in_order, self.max_grad_norm)
        super().step(closure)
        super().zero_grad()
        for master, p in self.working.items():
            p.data.copy_(master)


@dataclass
class Run:
    """What a script left behind.

    losses: of each step.
    weights: the model's state_dict.
    initial: fp32 values before the first step, of the reference.
    plan, session: of the offloaded run.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    plan: Plan | None = None
    session: executor.Session | None = None


def run_script(name: str, folder: Path, *arguments: str) -> Run:
    """Run the script in this process, on one thread."""
    out = folder / f"{name}.pt"
    before = sys.argv, list(sys.path), torch.get_num_threads()
    sys.argv = [name, "--out", str(out), *arguments]
    sys.path.insert(0, str(SCRIPTS))
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages that the script uses
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        torch.set_num_threads(before[2])
    kept = torch.load(out, weights_only=True)
    return Run(kept["losses"], kept["weights"])


def own(name: str, folder: Path, *arguments: str) -> Run:
    return run_script(name, folder, *arguments)


def offloaded(name: str, folder: Path, gpu_memory: str, *arguments: str, policy: str = "optimal") -> Run:
    """The script with one line more: `offload` on its Trainer before `train()`, or the script's own marked line."""
    plans: list[Plan] = []
    sessions: list[executor.Session] = []
    with contextlib.ExitStack() as stack:
        if name in OF_A_TRAINER:
            import transformers

            plain = transformers.Trainer.train

            def train(self: Any, *args: Any, **kwargs: Any) -> Any:
                offload(self, gpu_memory, policy=policy, on_plan=plans.append)
                done = plain(self, *args, **kwargs)
                sessions.append(self.offload_session)
                return done

            stack.enter_context(replaced(transformers.Trainer, "train", train))
        else:
            arguments = (*arguments, "--gpu-memory", gpu_memory, "--policy", policy)
            plain_prepare = executor.offloading.prepare  # of `executor.offload` and of the strategy alike

            def prepare(model: nn.Module, plan: Plan, *args: Any, **kwargs: Any) -> Any:
                plans.append(plan)
                done = plain_prepare(model, plan, *args, **kwargs)
                sessions.append(done[1].session)
                return done

            stack.enter_context(replaced(executor.offloading, "prepare", prepare))
        run = run_script(name, folder, *arguments)
    run.plan, run.session = plans[-1], sessions[-1]
    return run


def written_out(name: str, folder: Path, *arguments: str) -> Run:
    """The script with the reference's optimizer in the place of its own."""
    made: list[WrittenOut] = []

    def reference(model: nn.Module, optimizer: Any, *_: Any, max_grad_norm: float | None = None, **__: Any) -> Any:
        made.append(WrittenOut(model, optimizer, torch.bfloat16, max_grad_norm))
        return model, made[-1]

    with contextlib.ExitStack() as stack:
        if name in OF_A_TRAINER:
            import transformers

            plain = transformers.Trainer.create_optimizer

            def create_optimizer(self: Any, *args: Any) -> Any:
                optimizer = plain(self, *args)
                self.optimizer = reference(self.model, optimizer, max_grad_norm=self.args.max_grad_norm or None)[1]
                return self.optimizer

            stack.enter_context(replaced(transformers.Trainer, "create_optimizer", create_optimizer))
        elif name == "plain_loop":
            stack.enter_context(replaced(executor, "offload", reference))
            arguments = (*arguments, "--gpu-memory", "none")
        else:
            stack.enter_context(_reference_of_lightning(reference))
        run = run_script(name, folder, *arguments)
    run.initial = made[-1].initial
    return run


@contextlib.contextmanager
def _reference_of_lightning(reference: Callable[..., Any]) -> Iterator[None]:
    """Lightning's own strategy, whose optimizer is the reference's: it clips, and clears after the step."""
    from lightning.pytorch.strategies import SingleDeviceStrategy as Strategy

    plain = Strategy.setup_optimizers

    def setup_optimizers(self: Any, trainer: Any) -> None:
        plain(self, trainer)
        (own,) = self.optimizers
        self.optimizers = [reference(self.lightning_module, own, max_grad_norm=trainer.gradient_clip_val)[1]]
        self.precision_plugin.clip_gradients = lambda *_, **__: None

    def optimizer_step(self: Any, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        done = closure()
        optimizer.step()
        return done

    with replaced(Strategy, "setup_optimizers", setup_optimizers), replaced(Strategy, "optimizer_step", optimizer_step):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def loss_distance(a: Run, b: Run) -> float:
    """Largest distance, relative, of a step's losses."""
    return max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))


def path_distance(a: Run, b: Run, initial: dict[str, torch.Tensor]) -> float:
    """Distance of the trained parameters, as a share of the way of `b` from its initial values."""
    apart = sum(float((a.weights[n].float() - b.weights[n].float()).square().sum()) for n in initial)
    way = sum(float((b.weights[n].float() - value).square().sum()) for n, value in initial.items())
    return float((apart / way) ** 0.5)


def equal_to_the_bit(a: Run, b: Run) -> bool:
    same = a.weights.keys() == b.weights.keys()
    return same and a.losses == b.losses and all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)
