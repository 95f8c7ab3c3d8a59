"""The rows of the semantics table: what a training loop may contain, each as a small run beside plain PyTorch.

Loaded by path, from tests/executor/test_semantics_matrix.py (a covering subset) and benchmarks/semantics.py (every row
x dtype x policy). A cell trains one model twice, by a plan at a budget where chunks have to move and in plain PyTorch,
and gives the largest relative difference of losses, parameters, master copies, both moments and buffers.

The reference. fp32: torch.optim.AdamW(fused=True). bf16 and fp16: the same over fp32 master copies of the loaded
weights, gradients cast to fp32 and summed there, working copy = cast(master); fp16 under torch.amp.GradScaler. States
in bf16: the same, its moments rounded to bf16 after each step.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import executor
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.workload.optimizers import with_optimizer

_spec = importlib.util.spec_from_file_location("executor_test_kit", Path(__file__).parent / "conftest.py")
assert _spec is not None and _spec.loader is not None
kit = importlib.util.module_from_spec(_spec)
import sys  # noqa: E402

sys.modules["executor_test_kit"] = kit  # its dataclasses look themselves up
_spec.loader.exec_module(kit)

POLICIES = ("static_partition", "patrickstar", "tide", "zero_offload", "optimal")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-6
LR, WEIGHT_DECAY = 1e-2, 0.1


@dataclass(kw_only=True)
class Case:
    """One thing a loop may contain. draw(generator) gives a batch (keyword arguments), loss(model, batch) the loss.

    groups(model): parameter groups. schedule(optimizer): a learning-rate scheduler. inside(): a context around each
    forward and backward. between(model, step): what happens after each step, on both models alike. recorded: the
    workload comes from a recorded iteration (fake tensors cannot run the model). before(model): applied after the cast.
    on_plan: no deviation is expected. scale: of AdamW, for fp16. variable(step): another batch for some steps.
    """

    model: nn.Module
    draw: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor] = kit.loss_of
    micro_batches: int = 1
    clip: float | None = None
    update: str = "step"
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    between: Callable[[nn.Module, int], Any] | None = None
    after_prepare: Callable[[nn.Module], None] | None = None
    recorded: bool = False
    on_plan: bool = True
    optimizer: str = "adamw"
    scale: Any = None
    steps: int = 3
    variable: Callable[[int, Any], Any] | None = None
    check: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class Row:
    """make(): the case, its weights in fp32. exceptions: dtype -> why the row cannot be had in it. policies: those it
    is about, if not all."""

    name: str
    make: Callable[[], Case]
    exceptions: dict[str, str] = field(default_factory=dict)
    policies: tuple[str, ...] = POLICIES


@dataclass(frozen=True)
class Cell:
    """Largest relative differences, and how the run went."""

    losses: float
    parameters: float
    moments: float
    buffers: float
    deviations: int
    skipped_steps: int

    @property
    def worst(self) -> float:
        return max(self.losses, self.parameters, self.moments, self.buffers)


class Plain:
    """Plain training of `model`, as the head of this file has it."""

    def __init__(self, model: nn.Module, case: Case, dtype: str, scaled: bool) -> None:
        self.model, self.case = model, case
        self.masters = dtype != "fp32"
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.value = {n: nn.Parameter(p.detach().float()) if self.masters else p for n, p in named}
        self.names = {id(p): n for n, p in named}
        rows = case.groups(model) if case.groups else [{"params": [p for _, p in named]}]
        groups = [{**row, "params": [self.value[self.names[id(p)]] for p in row["params"]]} for row in rows]
        self.order = [self.names[id(p)] for row in rows for p in row["params"]]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
        spec = executor.LossScale() if case.scale is None else case.scale
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=spec.init_scale, growth_factor=spec.growth_factor, backoff_factor=spec.backoff_factor,
            growth_interval=spec.growth_interval, enabled=scaled,
        )  # fmt: skip
        self.skipped = 0

    def backward(self, loss: torch.Tensor) -> None:
        self.scaler.scale(loss).backward()
        if not self.masters:
            return
        for name, p in self.model.named_parameters():
            if p.grad is not None and name in self.value:
                master, gradient = self.value[name], p.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                p.grad = None

    def step(self) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.case.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(self.value.values()), self.case.clip)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        self.optimizer.zero_grad()
        if self.case.optimizer == "adamw-bf16-states":
            for state in self.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].bfloat16())
        if self.masters:
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    if name in self.value:
                        p.copy_(self.value[name])


def plan_for(case: Case, model: nn.Module, batch: Any, policy: str, spec: executor.AdamW) -> Plan:
    """A tight plan of the case: from a trace under fake tensors, or from a recorded iteration."""
    first = next(iter(batch.values()))
    sizes = {"batch": first.shape[0], "sequence": first.shape[1] if "input_ids" in batch else 1}

    def loss(module: nn.Module, one: Any) -> torch.Tensor:
        with case.inside():
            return case.loss(module, one)

    if case.recorded:
        machine = kit.small_machine(10**9)
        w = executor.record(
            model, [batch] * case.micro_batches, machine, name="row", optimizer=spec, loss=loss, timed=0, **sizes
        )
    else:
        w = executor.capture_module(model, batch, name="row", loss=loss, **sizes)
        w = kit.repeat_micro_batch(w, case.micro_batches)
    if case.groups is not None:
        groups = executor.optimizer.group_of(spec.groups(model))
        w = replace(w, tensors=executor.moments.describe_parameters(model, groups)[0])
    w = with_optimizer(w, case.optimizer)
    return kit.tight_plan(policy, w, Settings(update=case.update, clip=case.clip is not None))


def run_cell(row: Row, dtype: str, policy: str) -> Cell:
    """Train both. Raises AssertionError where something other than a figure is wrong (step counts, skipped steps,
    deviations)."""
    torch.manual_seed(0)
    case = row.make()
    model = case.model.to(DTYPES[dtype])

    def draw(generator: torch.Generator, step: int = 0) -> Any:
        batch = case.draw(generator)
        if case.variable is not None:
            batch = case.variable(step, batch)
        return {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in batch.items()}

    twin = copy.deepcopy(model)
    spec = executor.AdamW(
        case.groups(model) if case.groups else None,
        lr=LR,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=case.clip,
        eager=case.update == "eager",
        state_dtype=torch.bfloat16 if case.optimizer == "adamw-bf16-states" else torch.float32,
        loss_scale=case.scale,
    )
    plan = plan_for(case, model, draw(torch.Generator().manual_seed(9)), policy, spec)
    if case.groups is not None:  # the description names the parameters of the model that is prepared
        spec = replace(spec, params_or_groups=case.groups(model))
    model, optimizer = executor.prepare(model, plan, spec, watchdog_s=20.0)
    session = optimizer.session
    try:
        plain = Plain(twin, case, dtype, scaled=session.scaling is not None)
        if case.after_prepare is not None:
            case.after_prepare(model)
            case.after_prepare(twin)
        mine, theirs = _train(case, model, optimizer, plain, draw)
        if case.on_plan:
            assert session.deviations == 0, list(session.deviation_log)
        assert session.skipped_steps == plain.skipped
        if session.scaling is not None:
            assert session.loss_scale == plain.scaler.get_scale()
        if case.check is not None:
            case.check(session)
        return _compare(case, model, optimizer, plain, mine, theirs)
    finally:
        session.close(restore=False)


def _train(
    case: Case, model: nn.Module, optimizer: Any, plain: Plain, draw: Callable[..., Any]
) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(1)
    schedules = [case.schedule(o) for o in (optimizer, plain.optimizer)] if case.schedule else []
    mine: list[float] = []
    theirs: list[float] = []
    for step in range(case.steps):
        for micro_batch in range(case.micro_batches):
            batch = draw(generator, step)
            for losses, module in ((mine, model), (theirs, plain.model)):
                torch.manual_seed(1000 * step + micro_batch)
                with case.inside():
                    loss = case.loss(module, batch) / case.micro_batches
                    if module is model:
                        loss.backward()
                    else:
                        plain.backward(loss)
                losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        for schedule in schedules:
            schedule.step()
        if case.between is not None:
            got, expected = case.between(model, step), case.between(plain.model, step)
            assert torch.equal(got, expected), "what happens between steps differs"
    return mine, theirs


def _compare(
    case: Case, model: nn.Module, optimizer: Any, plain: Plain, mine: list[float], theirs: list[float]
) -> Cell:
    losses = max(
        (abs(a - b) / abs(b) if math.isfinite(b) and b else float(a != b and b == b)) for a, b in zip(mine, theirs)
    )
    values = model.state_dict()
    named = dict(plain.model.named_parameters(remove_duplicate=False))
    parameters = max(kit.distance(values[name].float(), p.detach().float()) for name, p in named.items())
    moments = 0.0
    state, theirs_state = optimizer.state_dict()["state"], plain.optimizer.state
    for number, name in enumerate(plain.order):
        value = plain.value[name]
        expected = theirs_state.get(value)
        if not expected:
            assert number not in state, f"{name} has been updated"
            continue
        row = state[number]
        assert int(row["step"]) == int(expected["step"]), name
        for key in ("exp_avg", "exp_avg_sq"):
            moments = max(moments, kit.distance(row[key].float(), expected[key]))
        if "param32" in row:
            parameters = max(parameters, kit.distance(row["param32"], value.detach()))
            assert torch.equal(values[name], row["param32"].to(values[name].dtype)), f"{name} is not cast(master)"
    buffers = 0.0
    for name, buffer in plain.model.named_buffers():
        if buffer.numel():
            found = dict(model.named_buffers())[name]
            buffers = max(buffers, kit.distance(found.float(), buffer.float()))
    session = optimizer.session
    return Cell(losses, parameters, moments, buffers, session.deviations, session.skipped_steps)


# -- models -----------------------------------------------------------------------------------------------------------


def vectors(width: int = 40, rows: int = 3) -> Callable[[torch.Generator], Any]:
    return lambda draw: {"x": torch.randn(rows, width, generator=draw)}


def text(rows: int = 2, length: int = 12, vocabulary: int = 96) -> Callable[[torch.Generator], Any]:
    def draw(generator: torch.Generator) -> Any:
        ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return draw


def square(x: torch.Tensor) -> torch.Tensor:
    """A loss in fp32: that of a half-precision model is taken so, as in any loop."""
    return (x.float() ** 2).mean()


class Stack(nn.Module):
    """Five layers."""

    def __init__(self, width: int = 40, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return square(x)


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def gpt2(**changes: Any) -> nn.Module:
    import transformers

    numbers = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 96, "n_positions": 32, **_NO_DROPOUT}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**numbers, **changes}))
    model.config.use_cache = False
    return model.train()


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """The usual two groups: no weight decay on vectors, and another rate for them."""
    rows = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in rows if p.dim() > 1]},
        {"params": [p for p in rows if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3, "betas": (0.8, 0.99)},
    ]


def warmed(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


OVERFLOWING = executor.LossScale(init_scale=2.0**24, growth_interval=2)  # falls, then grows, in a few steps

ROWS = [
    Row("plain", lambda: Case(model=gpt2(), draw=text())),
    Row("eager updates", lambda: Case(model=gpt2(), draw=text(), update="eager")),
    Row("accumulation", lambda: Case(model=gpt2(), draw=text(), micro_batches=3)),
    Row("clipping", lambda: Case(model=gpt2(), draw=text(), clip=0.5)),
    Row("clipping, accumulation", lambda: Case(model=gpt2(), draw=text(), clip=0.5, micro_batches=3)),
    Row(
        "overflow and skipped steps",
        lambda: Case(model=gpt2(), draw=text(), clip=0.5, micro_batches=2, steps=9, scale=OVERFLOWING),
    ),
    Row(
        "parameter groups and a schedule",
        lambda: Case(model=gpt2(), draw=text(), groups=decayed, schedule=warmed, clip=0.5),
    ),
    Row("states in bf16", lambda: Case(model=gpt2(), draw=text(), optimizer="adamw-bf16-states", micro_batches=2)),
]
