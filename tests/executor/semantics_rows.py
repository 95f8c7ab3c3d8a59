"""The rows of the semantics table: what a training loop may contain, each as a small run beside plain PyTorch.

Loaded by path, from test_semantics_matrix.py (a covering subset) and benchmarks/semantics.py (every row
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
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import executor
from executor.models import enable_checkpointing
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import Kind
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import Workload, with_optimizer

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
    forward and backward. between(model, step): what happens after each step, on both models alike;
    between_micro_batches: after each backward. recorded: the workload comes from a recorded iteration (fake tensors
    cannot run the model). on_plan: no deviation is expected. scale: AdamW's loss_scale (half_scale: in fp16 only).
    variable(step, batch): another batch for some steps. cast(model, dtype): makes the model of that dtype. driven:
    session.step runs the iterations. after_prepare(model): done to both models then. check(session): at the end.
    spare_bytes: gpu memory more than tight.
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
    half_scale: Any = None
    steps: int = 3
    variable: Callable[[int, Any], Any] | None = None
    check: Callable[[Any], None] | None = None
    spare_bytes: int = 0
    cast: Callable[[nn.Module, torch.dtype], nn.Module] = nn.Module.to
    between_micro_batches: Callable[[nn.Module, int], Any] | None = None
    driven: bool = False


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
            next(model.parameters()).device.type,
            init_scale=spec.init_scale,
            growth_factor=spec.growth_factor,
            backoff_factor=spec.backoff_factor,
            growth_interval=spec.growth_interval,
            enabled=scaled,
        )
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


CAPTURED: dict[tuple[Any, ...], Workload] = {}
"""One micro-batch, by what its capture depends on."""


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
        likeness = kit.likeness(model, batch)
        key = (case.inside, case.loss, likeness)
        one = None if likeness is None else CAPTURED.get(key)
        if one is None:
            one = executor.capture_module(model, batch, name="row", loss=loss, **sizes)
        if likeness is not None:
            CAPTURED[key] = one
        w = kit.repeat_micro_batch(one, case.micro_batches)
    if case.groups is not None:
        groups = executor.descriptions.group_of(spec.groups(model))
        w = replace(w, tensors=executor.moments.recorder.describe_parameters(model, groups)[0])
    w = with_optimizer(w, case.optimizer)
    settings = Settings(update=case.update, clip=case.clip is not None)
    if case.spare_bytes:
        machine = kit.tight_plan(policy, w, settings).machine
        gpu = machine.gpu.usable_bytes + case.spare_bytes
        return find_policy(policy)(w, kit.small_machine(gpu), settings)
    return kit.tight_plan(policy, w, settings)


def run_cell(
    row: Row, dtype: str, policy: str, *, modes: str | None = None, device: str = "cpu", **options: Any
) -> Cell:
    """Train both. Raises AssertionError where something other than a figure is wrong (step counts, skipped steps,
    deviations). modes: a chunk mode that the plan must have. device: of both; options: of prepare."""
    torch.manual_seed(0)
    case = row.make()
    if dtype == "fp16" and case.half_scale is not None:
        case.scale = case.half_scale
    model = case.cast(case.model, DTYPES[dtype])

    def draw(generator: torch.Generator, step: int = 0) -> Any:
        batch = case.draw(generator)
        if case.variable is not None:
            batch = case.variable(step, batch)
        return {k: v.to(DTYPES[dtype]) if v.is_floating_point() else v for k, v in batch.items()}

    def there(generator: torch.Generator, step: int = 0) -> Any:
        return {k: v.to(device) for k, v in draw(generator, step).items()}

    twin = copy.deepcopy(model).to(device)
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
    assert modes is None or modes in plan.modes
    if case.groups is not None:  # the description names the parameters of the model that is prepared
        spec = replace(spec, params_or_groups=case.groups(model))
    model, optimizer = executor.prepare(
        model, plan, spec, watchdog_s=20.0, device="virtual" if device == "cpu" else device, **options
    )  # fmt: skip
    session = optimizer.session
    try:
        plain = Plain(twin, case, dtype, scaled=session.scaling is not None)
        if case.after_prepare is not None:
            case.after_prepare(model)
            case.after_prepare(twin)
        mine, theirs = _train(case, model, optimizer, plain, there)
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
        batches = [draw(generator, step) for _ in range(case.micro_batches)]
        for micro_batch, batch in enumerate(batches):
            for losses, module in ((mine, model), (theirs, plain.model)):
                if case.driven and module is model:
                    continue
                torch.manual_seed(1000 * step + micro_batch)
                with case.inside():
                    loss = case.loss(module, batch) / case.micro_batches
                    if module is model:
                        loss.backward()
                    else:
                        plain.backward(loss)
                losses.append(float(loss.detach()))
            if case.between_micro_batches is not None:
                seen = [case.between_micro_batches(module, step) for module in (model, plain.model)]
                assert torch.equal(*seen), "an evaluation between micro-batches differs"
        if case.driven:
            mine.append(optimizer.session.step(batches, loss=case.loss).loss)
            theirs[step:] = [float(torch.tensor(theirs[step:]).sum())]  # in fp32, as the session adds them
        else:
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
        if not expected or not int(expected["step"]):  # GradScaler makes states that no step has used
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


class Gated(nn.Module):
    """A block with work of its own around a layer. torch's compiler leaves a bare nn.Linear as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * self.inner(torch.relu(x) + 1)


def gated_stack() -> nn.Module:
    model = Stack()
    model.layers = nn.ModuleList(Gated(40) for _ in range(5))
    return model


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


class Frozen(Stack):
    """Two of five layers frozen, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        for i in (1, 3):
            self.layers[i].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)


class Tied(Stack):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[4].weight = self.layers[0].weight


class Twice(Stack):
    """The middle layer is called twice, and the first one again at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 2, 2, 3, 4, 0):
            x = torch.tanh(self.layers[i](x)) + x
        return square(x)


class Pair(Stack):
    """An encoder; the loop calls it on two inputs and compares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def pairs(draw: torch.Generator) -> Any:
    return {"a": torch.randn(3, 40, generator=draw), "b": torch.randn(3, 40, generator=draw)}


def between_two(model: nn.Module, batch: Any) -> torch.Tensor:
    return square(model(batch["a"]).float() - model(batch["b"]).float())


class Outside(Stack):
    """Parameters read by a module that does not own them, and an inner value that the loop's loss uses too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            x = torch.tanh(layer(x)) + x
        return square(x @ self.layers[1].weight @ self.layers[4].weight) + square(self.layers[0].bias)


class Unused(Stack):
    """A layer nobody calls, and one whose output does not reach the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 1, 3):
            x = torch.tanh(self.layers[i](x)) + x
        self.layers[2](x)
        return square(x)


class Routed(nn.Module):
    """Four experts behind a router of the loop's own: `route` says which of them each micro-batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(40, 40)
        self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.gate = nn.Linear(40, 4)
        self.after = nn.Linear(40, 40)

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        weights = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for number in range(4):
            if bool(route[number]):
                out = out + weights[:, number : number + 1] * torch.tanh(self.experts[number](x))
        return square(self.after(out) + x)


def routed_batch(draw: torch.Generator) -> Any:
    return {"x": torch.randn(3, 40, generator=draw), "route": torch.ones(4, dtype=torch.int64)}


def two_experts(step: int, batch: Any) -> Any:
    """Every expert in the first step and in the fourth, two of the four in the others."""
    route = torch.ones(4, dtype=torch.int64) if step % 3 == 0 else torch.tensor([step % 2, 1, 1 - step % 2, 0])
    return {**batch, "route": route}


class Normed(nn.Module):
    """Convolutions and BatchNorm: running statistics are buffers that training changes."""

    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in ((3, 16), (16, 24), (24, 16))
        )
        self.head = nn.Linear(16, 24)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        return square(self.head(x.mean((2, 3))))


def pictures(draw: torch.Generator) -> Any:
    return {"x": torch.randn(4, 3, 8, 8, generator=draw)}


class Dropped(nn.Module):
    """Dropout in each layer; recompute: None, "reentrant" or "non-reentrant" checkpointing."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Dropout(0.3), nn.Tanh()) for _ in range(5))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "reentrant":
            x = x.requires_grad_()  # what enable_input_require_grads is for
        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant") + x
            else:
                x = layer(x) + x
        return square(x)


def checkpointed(model: nn.Module, reentrant: bool) -> nn.Module:
    enable_checkpointing("the test's model", model, reentrant=reentrant)
    if reentrant:
        model.enable_input_require_grads()
    return model


def lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj"], lora_dropout=0.0)
    with warnings.catch_warnings():  # peft's, about itself and about transformers
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(gpt2(), config)
    for name, parameter in model.named_parameters():  # a fresh adapter's output is 0: no gradient reaches lora_A
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


_UPDATES = ("writeback", "cpu_adam", "gpu_adam", "cpu_add")


def frozen_chunks_only_come_up(session: Any) -> None:
    """Frozen chunks have no states anywhere and are never written back; the link carries what the plan says.
    (PatrickStar evicts frozen payloads too, and brings updated parameters up in fp32, as published.)"""
    plan = session.plan
    frozen = {c.index for c in plan.layout.chunks if c.frozen}
    assert frozen
    assert not {r.list for r in session.arena.present if r.chunk in frozen} - {"param"}
    session.drain()
    last = session.iteration - 1
    for queue in ("h2d", "d2h"):
        copied = sum(
            r.copied_bytes for r in session.steps.span_log if r.iteration == last and r.step.queue.value == queue
        )
        assert copied == plan.moved_bytes[queue], queue
    wide = [s for s in plan.steps if s.kind is Kind.FETCH and s.bytes > plan.layout.payload_bytes(s.chunk, s.list)]
    assert not frozen & {s.chunk for s in wide}
    if plan.policy != "patrickstar":
        assert not wide
        assert not [r for r in session.steps.span_log if r.step.chunk in frozen and r.step.kind.value in _UPDATES]


def evaluated(model: nn.Module, step: int) -> torch.Tensor:
    """An evaluation without gradients, then training goes on."""
    model.eval()
    with torch.no_grad():
        loss = model(**text()(torch.Generator().manual_seed(step))).loss
    model.train()
    return loss


def no_grad(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(2, 40, dtype=next(model.parameters()).dtype))


def generated(model: nn.Module, step: int) -> torch.Tensor:
    """Tokens by transformers' generate, with its cache."""
    model.eval()
    prompt = torch.randint(0, 96, (2, 3), generator=torch.Generator().manual_seed(step))
    tokens = model.generate(
        prompt,
        max_new_tokens=4,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        attention_mask=torch.ones_like(prompt),
    )
    model.train()
    return tokens


def lengths(step: int, batch: Any) -> Any:
    """The planned length, then shorter and longer ones."""
    return {k: v[:, : (12, 8, 12, 5, 10)[step]] for k, v in batch.items()}


def longer(step: int, batch: Any) -> Any:
    """Longer than planned from the second step on: off plan, and after three of them a new plan."""
    return {k: v if step == 0 else torch.cat([v, v[:, :4]], 1) for k, v in batch.items()}


def planned_anew(session: Any) -> None:
    assert any("new plan" in line for line in session.deviation_log)


def offloaded() -> Any:
    """What save_on_cpu does where the accelerator is another device: everything saved is a copy."""
    return torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.detach)


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def only_matrices(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Linear layers in the dtype, norms and embeddings as they are: parameters of two dtypes in one model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
    return model


class MixedTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(40) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        for layer, norm in zip(self.layers, self.norms):
            x = torch.tanh(layer(norm(x).to(layer.weight.dtype))).float() + x
        return square(x)


def half_base(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Adapters stay in fp32 beside a frozen base of the dtype, as peft leaves them."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """torch.compile warns of what it does itself (it reads `.grad` of the tensors it is given)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def met_hooks(session: Any) -> None:
    """The compiler was at work in the offloaded model: it broke its graphs at the engine's hooks, which are not to be
    traced. The twin has no such function."""
    assert any("disable()" in reason for reason in counters["graph_break"])


def forget_compiled() -> None:
    """Let the compiler begin anew: it would use what it has of another row's models."""
    torch._dynamo.reset()
    counters.clear()


def compiled(backend: str, whole: bool) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        forget_compiled()
        for module in [model] if whole else model.layers:
            module.compile(backend=backend)

    return apply


def compiled_blocks() -> nn.Module:
    """Blocks replaced by compiled ones: their parameters have other names."""
    forget_compiled()
    model = gated_stack()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="aot_eager")
    return model


def transformer(kind: str, **numbers: Any) -> Callable[[], nn.Module]:
    """A tiny transformers model by the names of its config and model class."""

    def make() -> nn.Module:
        import transformers

        config_name, model_name = kind.split(":")
        model = getattr(transformers, model_name)(getattr(transformers, config_name)(**numbers))
        model.config.use_cache = False
        return model.train()

    return make


def no_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
    return model


_LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 96,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_BERT = {**_LLAMA, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_EXPERTS = {
    "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 16,
}  # fmt: skip
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96, "dropout_rate": 0.0,
       "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
_VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 16,
        "patch_size": 8, "num_labels": 5, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def vit_batch(draw: torch.Generator) -> Any:
    return {
        "pixel_values": torch.randn(2, 3, 16, 16, generator=draw),
        "labels": torch.randint(0, 5, (2,), generator=draw),
    }


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "llama": (transformer("LlamaConfig:LlamaForCausalLM", **_LLAMA, num_key_value_heads=1), text()),
    "qwen2": (transformer("Qwen2Config:Qwen2ForCausalLM", **_LLAMA, num_key_value_heads=2), text()),
    "gemma": (transformer("GemmaConfig:GemmaForCausalLM", **_LLAMA, num_key_value_heads=1, head_dim=16), text()),
    "gpt_neox": (transformer("GPTNeoXConfig:GPTNeoXForCausalLM", **_LLAMA), text()),
    "opt": (
        transformer(
            "OPTConfig:OPTForCausalLM", hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=96, max_position_embeddings=32, dropout=0.0, word_embed_proj_dim=32,
        ),
        text(),
    ),
    "bloom": (
        transformer("BloomConfig:BloomForCausalLM", hidden_size=32, n_layer=2, n_head=2, vocab_size=96), text()
    ),
    "phi": (transformer("PhiConfig:PhiForCausalLM", **_LLAMA), text()),
    "bert": (transformer("BertConfig:BertForMaskedLM", **_BERT), text()),
    "t5": (transformer("T5Config:T5ForConditionalGeneration", **_T5), text()),
    "vit": (transformer("ViTConfig:ViTForImageClassification", **_VIT), vit_batch),
}  # fmt: skip

EXPERTS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Any]]] = {
    "mixtral": (transformer("MixtralConfig:MixtralForCausalLM", **_LLAMA, **_EXPERTS), text()),
    "qwen2_moe": (transformer("Qwen2MoeConfig:Qwen2MoeForCausalLM", **_LLAMA, **_EXPERTS), text()),
}


def architecture(name: str, *, steps: int = 2, **more: Any) -> Row:
    make, draw = {**ARCHITECTURES, **EXPERTS}[name]
    return Row(
        f"transformers: {name}",
        lambda: Case(model=no_dropout(make()), draw=draw, steps=steps, half_scale=QUIET, **more),
    )


QUIET = executor.LossScale(init_scale=2.0**10)  # for losses in fp16, which begin to overflow at 2^16
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
    Row("frozen parameters", lambda: Case(model=Frozen(), draw=vectors(), clip=0.5, check=frozen_chunks_only_come_up)),
    Row("LoRA", lambda: Case(model=lora(), draw=text(), clip=0.5, check=frozen_chunks_only_come_up)),
    Row("LoRA in fp32 on its base", lambda: Case(model=lora(), draw=text(), cast=half_base)),
    Row("tied weights", lambda: Case(model=Tied(), draw=vectors(), micro_batches=2)),
    Row("a module called twice", lambda: Case(model=Twice(), draw=vectors(), micro_batches=2)),
    Row("parameters of another module", lambda: Case(model=Outside(), draw=vectors())),
    Row("unused parameters", lambda: Case(model=Unused(), draw=vectors(), micro_batches=2)),
    Row(
        "routed experts, unused in some steps",
        lambda: Case(
            model=Routed(),
            draw=routed_batch,
            variable=two_experts,
            recorded=True,
            on_plan=False,
            steps=5,
            micro_batches=2,
            clip=0.5,
        ),
    ),
    Row("BatchNorm", lambda: Case(model=Normed(), draw=pictures)),
    # The loop holds all three batches at once; the first iteration finds them.
    Row("BatchNorm, accumulation", lambda: Case(model=Normed(), draw=pictures, micro_batches=3, spare_bytes=20_000)),
    Row("BatchNorm under recompute", lambda: Case(model=Normed(True), draw=pictures, micro_batches=2)),
    Row("dropout", lambda: Case(model=Dropped(), draw=vectors())),
    Row("dropout under recompute", lambda: Case(model=Dropped("non-reentrant"), draw=vectors(), micro_batches=2)),
    Row("dropout under reentrant recompute", lambda: Case(model=Dropped("reentrant"), draw=vectors())),
    Row("checkpointing", lambda: Case(model=checkpointed(gpt2(), False), draw=text(), micro_batches=2)),
    Row("checkpointing, reentrant", lambda: Case(model=checkpointed(gpt2(), True), draw=text(), micro_batches=2)),
    Row("activation offload", lambda: Case(model=gpt2(), draw=text(), inside=offloaded, micro_batches=2)),
    Row(
        "activation offload, other lengths",
        lambda: Case(model=gpt2(), draw=text(), inside=offloaded, variable=lengths, on_plan=False, steps=5),
    ),
    Row("save_on_cpu", lambda: Case(model=gpt2(), draw=text(), inside=torch.autograd.graph.save_on_cpu)),
    Row(
        "autocast",
        # Its cache of casts is there in backward, too, which a capture's loss has left.
        lambda: Case(model=gpt2(), draw=text(), inside=autocast, spare_bytes=80_000),
        exceptions={"fp16": "plain torch: no layer_norm on the CPU for a bf16 input and fp16 weights"},
    ),
    Row("parameters of two dtypes", lambda: Case(model=MixedTypes(), draw=vectors(), cast=only_matrices)),
    Row(
        "evaluation between micro-batches",
        lambda: Case(
            model=gpt2(), draw=text(), micro_batches=2, between_micro_batches=evaluated, on_plan=False, clip=0.5
        ),
    ),
    Row(
        "parameters of another module, evaluation",
        lambda: Case(model=Outside(), draw=vectors(), between=lambda model, step: no_grad(model)),
    ),
    Row("evaluation between steps", lambda: Case(model=gpt2(), draw=text(), between=evaluated)),
    Row("generate between steps", lambda: Case(model=gpt2(), draw=text(), between=generated)),
    Row("batches of other lengths", lambda: Case(model=gpt2(), draw=text(), variable=lengths, on_plan=False, steps=5)),
    Row(
        "longer batches, new plan",
        lambda: Case(
            model=gpt2(), draw=text(), variable=longer, on_plan=False, steps=6, spare_bytes=900_000, check=planned_anew
        ),
    ),
    Row("session.step", lambda: Case(model=gpt2(), draw=text(), driven=True, micro_batches=2, clip=0.5)),
    Row("two forwards, one backward", lambda: Case(model=Pair(), draw=pairs, loss=between_two)),
    Row(
        "torch.compile before prepare",
        lambda: Case(model=compiled_blocks(), draw=vectors(), inside=quietly, check=met_hooks),
    ),
    Row(
        "torch.compile of blocks",
        lambda: Case(
            model=gated_stack(),
            draw=vectors(),
            after_prepare=compiled("aot_eager", False),
            inside=quietly,
            check=met_hooks,
        ),
    ),
    Row(
        "torch.compile of the model",
        lambda: Case(
            model=gated_stack(),
            draw=vectors(),
            after_prepare=compiled("aot_eager", True),
            inside=quietly,
            check=met_hooks,
        ),
    ),
    *(architecture(name) for name in ARCHITECTURES),
    *(architecture(name, recorded=True, on_plan=False) for name in EXPERTS),
]
