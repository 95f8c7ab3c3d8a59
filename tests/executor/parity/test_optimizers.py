"""Each optimizer, under a plan that moves chunks, is plain torch's to the bit: losses, parameters and states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from later import Later
from plain_loop import train
from thinned import by_turns
from torch import nn

import executor
from executor.describing import Joined
from executor.devices.rules import RULES
from pstar_sim.core.workspace import WHOLE_BYTES
from pstar_sim.errors import CheckpointError, ContractError, PlanError
from pstar_sim.policy.registry import find_policy

WIDTH, STEPS = 48, 3
optimization = Later("transformers.optimization")


class Lion(torch.optim.Optimizer):
    """The optimizer of the package lion-pytorch, by its formula."""

    __module__ = "lion_pytorch.lion_pytorch"

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(momentum.mul(beta1).add_(p.grad, alpha=1 - beta1).sign_(), alpha=-group["lr"])
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-1, weight_decay=0.1),
    "sgd-momentum": lambda ps: torch.optim.SGD(ps, lr=1e-1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adafactor": lambda ps: optimization.Adafactor(
        ps, lr=1e-2, relative_step=False, scale_parameter=False, weight_decay=0.1
    ),
    "lion": lambda ps: Lion(ps, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x.float() ** 2).mean()


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def rows(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(4, WIDTH, generator=draw).to(dtype)


def offloaded(model: nn.Module, optimizer: Any, dtype: torch.dtype, micro_batches: int, policy: str) -> Any:
    return executor.offload(
        model,
        optimizer,
        (torch.zeros(4, WIDTH, dtype=dtype),),
        gpu_memory="90KB" if policy == "zero_offload" else "34KB" if dtype is torch.bfloat16 else "68KB",
        micro_batches=micro_batches,
        masters="none",
        policy=policy,
    )[1]


DTYPES = [(torch.float32,), (torch.bfloat16,)]


@pytest.mark.parametrize(
    ("name", "policy", "micro_batches", "dtype"),
    by_turns(
        [
            ("adamw", "tide", 4),
            ("adamw", "optimal", 1),
            ("adam", "optimal", 4),
            ("adam", "tide", 1),
            ("sgd", "tide", 1),
            ("sgd", "optimal", 4),
            ("sgd-momentum", "optimal", 1),
            ("sgd-momentum", "tide", 4),
            ("lion", "tide", 1),
            ("lion", "optimal", 4),
            ("adafactor", "tide", 4),
            ("adafactor", "optimal", 1),
            ("adafactor", "zero_offload", 4),
        ],
        DTYPES,
    ),
)
def test_is_plain_torch_to_the_bit(name: str, policy: str, micro_batches: int, dtype: torch.dtype) -> None:
    """Pure bf16 has no masters: parameters, sums of gradients and moments are in bf16, as torch has them. 13 rows in
    one dtype or the other, each optimizer in both; 26 with --whole."""
    reference, model = net(dtype), net(dtype)
    plain, mine = (OPTIMIZERS[name](each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(dtype), STEPS, micro_batches)
    optimizer = offloaded(model, mine, dtype, micro_batches, policy)
    session = optimizer.session
    try:
        assert session.plan.workload.optimizer.name == name
        assert train(model, optimizer, rows(dtype), STEPS, micro_batches) == losses
        moved = session.status().links
        assert moved["h2d"].moved_bytes > 0
        states = optimizer.state_dict()["state"]
        for n, row in plain.state_dict()["state"].items():
            for key, value in row.items():
                if isinstance(value, torch.Tensor) and key != "RMS":  # Adafactor: of the parameter, not a state
                    assert torch.equal(states[n][key].to(value.dtype), value), (n, key)
    finally:
        session.close()
    for mine_now, theirs in zip(model.parameters(), reference.parameters()):
        assert torch.equal(mine_now, theirs)


@pytest.mark.parametrize(("name", "micro_batches"), [("adamw", 1), ("sgd-momentum", 4), ("adafactor", 4)])
def test_clipping_in_pure_bf16_is_torchs(name: str, micro_batches: int) -> None:
    """Norms, factor and clipped gradients are in bf16, as `clip_grad_norm_` has them."""
    dtype = torch.bfloat16
    reference, model = net(dtype), net(dtype)
    plain, batches, norms = OPTIMIZERS[name](reference.parameters()), rows(dtype), []
    for _ in range(STEPS):
        for _ in range(micro_batches):
            (reference(next(batches)) / micro_batches).backward()
        norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 1e-2)))
        plain.step()
        plain.zero_grad()
    _, optimizer = executor.offload(
        model, OPTIMIZERS[name](model.parameters()), (torch.zeros(4, WIDTH, dtype=dtype),), gpu_memory="40KB",
        micro_batches=micro_batches, max_grad_norm=1e-2, masters="none", policy="tide",
    )  # fmt: skip
    batches = rows(dtype)
    for norm in norms:
        train(model, optimizer, batches, 1, micro_batches)
        assert optimizer.session.grad_norm == norm
    optimizer.session.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), reference.parameters()))


@pytest.mark.parametrize("name", ["adam", "sgd-momentum", "lion", "adafactor"])
def test_states_go_both_ways(name: str, tmp_path: Path) -> None:
    """Two plain steps, two under a plan, a checkpoint into another plan, two there, and two plain ones again."""
    dtype = torch.float32
    reference, model = net(dtype), net(dtype)
    plain, mine = (OPTIMIZERS[name](each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(dtype), 8, 1)
    batches = rows(dtype)
    found = train(model, mine, batches, 2, 1)
    optimizer = offloaded(model, mine, dtype, 1, "tide")
    found += train(model, optimizer, batches, 2, 1)
    folder = optimizer.save(tmp_path / "checkpoint")
    optimizer.session.close()
    other = net(dtype)
    optimizer = offloaded(other, OPTIMIZERS[name](other.parameters()), dtype, 1, "zero_offload")
    optimizer.load(folder)
    found += train(other, optimizer, batches, 2, 1)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer.session.close()
    last = OPTIMIZERS[name](other.parameters())
    last.load_state_dict(states)
    found += train(other, last, batches, 2, 1)
    assert found == losses


def test_adafactor_by_the_size_of_parameters_and_its_own_steps() -> None:
    """The defaults of transformers, whose lr follows the step and each parameter; a stack of matrices, and a number."""

    class Stacks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 7)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for matrix in self.stack:
                x = torch.tanh(x @ matrix) * self.scale * self.one
            return (x**2).mean()

    torch.manual_seed(3)
    reference = Stacks()
    model = copy.deepcopy(reference)
    plain, mine = (optimization.Adafactor(each.parameters()) for each in (reference, model))
    losses = train(reference, plain, rows(torch.float32), 20, 1)
    batch = (torch.zeros(4, WIDTH),)
    _, optimizer = executor.offload(model, mine, batch, gpu_memory="120KB", policy="zero_offload")
    assert train(model, optimizer, rows(torch.float32), 20, 1) == losses
    optimizer.session.close()
    assert all(torch.equal(own, theirs) for own, theirs in zip(model.parameters(), reference.parameters()))


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The usual two optimizers of a loop with Muon."""
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) is both] for both in (True, False))
    return [torch.optim.Muon(matrices, lr=2e-2), torch.optim.AdamW(rest, lr=1e-2, fused=True)]


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@needs_muon
@pytest.mark.parametrize(
    ("policy", "micro_batches", "dtype"), by_turns([("optimal", 4), ("tide", 1), ("zero_offload", 4)], DTYPES)
)
def test_muon_beside_adamw_is_plain_torch_to_the_bit(policy: str, micro_batches: int, dtype: torch.dtype) -> None:
    """Matrices are updated whole, once per step, from the sum over all micro-batches, wherever they are."""
    reference, model = net(dtype), net(dtype)
    losses = train(reference, muon(reference), rows(dtype), STEPS, micro_batches)
    own = muon(model)
    _, optimizer = executor.offload(
        model,
        own,
        (torch.zeros(4, WIDTH, dtype=dtype),),
        gpu_memory="120KB" if policy == "zero_offload" else "80KB",
        micro_batches=micro_batches,
        masters="none",
        policy=policy,
    )
    assert train(model, optimizer, rows(dtype), STEPS, micro_batches) == losses
    moved = optimizer.session.status().links["h2d"].moved_bytes
    assert moved > 0 and optimizer.param_groups[0] is own[0].param_groups[0]
    optimizer.session.close()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), reference.parameters()))


@needs_muon
def test_states_of_muon_and_adamw_go_on(tmp_path: Path) -> None:
    """Two plain steps, two under a plan, two after a checkpoint, and two plain ones again."""
    dtype = torch.float32
    reference, model = net(dtype), net(dtype)
    losses = train(reference, muon(reference), rows(dtype), 8, 1)
    batches, batch, own = rows(dtype), (torch.zeros(4, WIDTH),), muon(model)
    found = train(model, own, batches, 2, 1)
    _, optimizer = executor.offload(model, own, batch, gpu_memory="80KB", policy="tide")
    found += train(model, optimizer, batches, 2, 1)
    folder = optimizer.save(tmp_path / "checkpoint")
    optimizer.session.close()
    other = net(dtype)
    _, optimizer = executor.offload(other, muon(other), batch, gpu_memory="120KB", policy="zero_offload")
    optimizer.load(folder)
    found += train(other, optimizer, batches, 2, 1)
    states = copy.deepcopy(optimizer.state_dict())
    optimizer.session.close()
    last = muon(other)
    Joined(last).load_state_dict(states)
    found += train(other, last, batches, 2, 1)
    assert found == losses


@needs_muon
def test_a_split_that_plans_do_not_have_is_refused() -> None:
    model = net(torch.float32)
    first, *rest = model.parameters()
    others = [p for p in rest if p.ndim == 2]
    wrong = [
        torch.optim.Muon(others),
        torch.optim.AdamW([first, *(p for p in rest if p.ndim != 2)]),
    ]
    with pytest.raises(PlanError, match=r"shape \(48, 48\) by adamw; plans update it by muon"):
        executor.offload(model, wrong, (torch.zeros(4, WIDTH),), gpu_memory="80KB")
    with pytest.raises(
        ContractError, match=r"the optimizers are AdamW; several run under a plan as torch\.optim\.Muon"
    ):
        executor.offload(model, wrong[1:], (torch.zeros(4, WIDTH),), gpu_memory="80KB")


def test_settings_that_the_plan_has_no_states_for_are_refused() -> None:
    model = net(torch.float32)
    optimizer = offloaded(model, OPTIMIZERS["sgd"](model.parameters()), torch.float32, 1, "tide")
    other = net(torch.float32)
    foreign = OPTIMIZERS["adam"](other.parameters()).state_dict()
    try:
        with pytest.raises(ContractError, match=r"group 0 has no momentum; give the state of the plan.s optimizer"):
            optimizer.load_state_dict(foreign)
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ContractError, match=r"param_groups\[0\] has momentum=0.9, which is not supported"):
            train(model, optimizer, rows(torch.float32), 1, 1)
    finally:
        optimizer.session.close(restore=False)


@needs_muon
def test_an_empty_group_keeps_its_place_and_one_group_has_both_kinds() -> None:
    """Settings follow the user's groups; prepare with executor.Muon() takes a plan of one group."""
    dtype = torch.float32
    reference, model = net(dtype), net(dtype)

    def optimizers(each: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = ([p for p in each.parameters() if (p.ndim == 2) is both] for both in (True, False))
        groups = [{"params": [], "lr": 0.1, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.Muon(matrices), torch.optim.AdamW(groups, lr=1e-2, fused=True)]

    losses = train(reference, optimizers(reference), rows(dtype), 3, 1)
    _, optimizer = executor.offload(
        model, optimizers(model), (torch.zeros(4, WIDTH),), gpu_memory="80KB", policy="tide"
    )
    assert train(model, optimizer, rows(dtype), 3, 1) == losses
    plan = optimizer.session.plan
    optimizer.session.close()
    one, two = net(dtype), net(dtype)
    alone = executor.capture_module(one, (torch.zeros(4, WIDTH),), groups=executor.Muon())
    assert {t.group for t in alone.tensors} == {0} and alone.optimizer == plan.workload.optimizer
    plan = find_policy("tide")(alone, plan.machine, plan.settings)
    _, optimizer = executor.prepare(one, plan, executor.Muon(rest=executor.AdamW(lr=1e-2)))
    theirs = [
        torch.optim.Muon([p for p in two.parameters() if p.ndim == 2]),
        torch.optim.AdamW([p for p in two.parameters() if p.ndim != 2], lr=1e-2, fused=True),
    ]
    assert train(one, optimizer, rows(dtype), 3, 1) == train(two, theirs, rows(dtype), 3, 1)
    optimizer.session.close()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = net(torch.float32)
    optimizer = offloaded(model, OPTIMIZERS["lion"](model.parameters()), torch.float32, 1, "tide")
    train(model, optimizer, rows(torch.float32), 1, 1)
    folder = optimizer.save(tmp_path / "checkpoint")
    optimizer.session.close()
    optimizer = offloaded(model, OPTIMIZERS["adam"](model.parameters()), torch.float32, 1, "tide")
    try:
        with pytest.raises(CheckpointError, match="its states are momentum, those of adam are momentum and variance"):
            optimizer.load(folder)
    finally:
        optimizer.session.close()


def test_a_checkpoint_of_pure_bf16_goes_on_with_and_without_masters(tmp_path: Path) -> None:
    """The weights of a checkpoint without masters are its masters. With masters the first losses are the same."""
    dtype = torch.bfloat16
    model = net(dtype)
    batches = rows(dtype)
    optimizer = offloaded(model, OPTIMIZERS["adamw"](model.parameters()), dtype, 1, "tide")
    train(model, optimizer, batches, 2, 1)
    folder = optimizer.save(tmp_path / "checkpoint")
    batch = next(batches)
    goes_on = train(model, optimizer, iter([batch]), 1, 1)
    values = [p.detach().clone() for p in model.parameters()]
    optimizer.session.close()
    for masters in ("none", "fp32"):
        other = net(dtype)
        with torch.random.fork_rng():
            _, again = executor.offload(
                other,
                OPTIMIZERS["adamw"](other.parameters()),
                (torch.zeros(4, WIDTH, dtype=dtype),),
                gpu_memory="60KB",
                masters=masters,
                policy="zero_offload",
            )
        again.load(folder)
        assert train(other, again, iter([batch]), 1, 1) == goes_on
        if masters == "none":
            assert all(torch.equal(p.detach(), value) for p, value in zip(other.parameters(), values))
        again.session.close()


def test_torchs_own_optimizer_beside_a_plan_has_the_plans_arithmetic() -> None:
    """SGD is not fused here, AdamW is."""
    parameters = list(net(torch.float32).parameters())
    assert executor.SGD(momentum=0.9).plain(parameters).defaults["fused"] is None
    assert executor.AdamW().plain(parameters).defaults["fused"] is True
    with pytest.raises(PlanError, match=r"Lion: torch\.optim has no such optimizer"):
        executor.Lion().plain(parameters)


def test_an_optimizer_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "muon", raising=False)
    with pytest.raises(PlanError, match=r"Muon: torch .* has no such optimizer; torch 2\.9 has"):
        executor.Muon()


def test_what_is_given_wrongly() -> None:
    model = net(torch.float32)
    with pytest.raises(ContractError, match="masters = 'bf16': it must be one of fp32, none"):
        executor.offload(model, OPTIMIZERS["adam"](model.parameters()), torch.zeros(4, WIDTH), masters="bf16")
    with pytest.raises(PlanError, match=r"SGD: momentum=-1 is out of range; it must be at least 0"):
        executor.SGD(momentum=-1)
    with pytest.raises(PlanError, match="SGD: nesterov=True needs a momentum above 0 and a dampening of 0"):
        executor.SGD(nesterov=True)
    some = [{"params": [p], "decoupled_weight_decay": not n} for n, p in enumerate(model.parameters())]
    with pytest.raises(ContractError, match="some groups of Adam have decoupled_weight_decay=True and some not"):
        executor.offload(model, torch.optim.Adam(some), torch.zeros(4, WIDTH))
    with pytest.raises(ContractError, match="the optimizers are none; several run under a plan"):
        executor.offload(model, None, torch.zeros(4, WIDTH))  # type: ignore[arg-type]
    half, batch = net(torch.float16), (torch.zeros(4, WIDTH, dtype=torch.float16),)
    with pytest.raises(PlanError, match="fp16 without fp32 masters: scaled gradients are unscaled in 16 bits"):
        executor.offload(half, OPTIMIZERS["sgd"](half.parameters()), batch, masters="none", gpu_memory="90KB")
    with pytest.raises(PlanError, match=r"Lion: betas=\(0.9, 1\) is out of range"):
        executor.Lion(betas=(0.9, 1))


class Normed(nn.Module):
    """A bf16 model whose norms and last layer stay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)).to(torch.bfloat16)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(6))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = torch.tanh(layer(norm(x.float()).to(torch.bfloat16)))
        return (self.last(x.float()) ** 2).mean()


@pytest.mark.parametrize(("name", "policy", "micro_batches"), [("adamw", "tide", 4), ("adafactor", "zero_offload", 1)])
def test_parameters_in_fp32_stay_so_in_pure_bf16(name: str, policy: str, micro_batches: int, tmp_path: Path) -> None:
    """Each parameter and its moments have their own width; a checkpoint goes on in another plan."""
    torch.manual_seed(3)
    reference = Normed()
    model, other = copy.deepcopy(reference), copy.deepcopy(reference)
    plain, own, last = (OPTIMIZERS[name](each.parameters()) for each in (reference, model, other))
    losses = train(reference, plain, rows(torch.bfloat16), 6, micro_batches)
    batches, found = rows(torch.bfloat16), list[float]()
    for each, its_optimizer, memory in ((model, own, "80KB"), (other, last, "400KB")):
        _, optimizer = executor.offload(
            each, its_optimizer, (torch.zeros(4, WIDTH, dtype=torch.bfloat16),), gpu_memory=memory,
            micro_batches=micro_batches, masters="none", policy=policy if each is model else "all_on_gpu",
        )  # fmt: skip
        if each is other:
            optimizer.load(tmp_path / "checkpoint")
        found += train(each, optimizer, batches, 3, micro_batches)
        if each is model:
            optimizer.save(tmp_path / "checkpoint")
        optimizer.session.close()
    assert found == losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other.parameters(), reference.parameters()))
    assert other.norms[0].weight.dtype == torch.float32


def test_the_plan_leaves_room_for_what_rules_take_on_the_host() -> None:
    """core/workspace.py: a piece for a buffer of a rule, and 16 bytes per element of a tensor updated whole."""
    assert {rule.buffers for rule in RULES.values()} == {0, 1}
    whole = [rule.room for rule in RULES.values() if rule.room is not None]
    assert whole and all(room(shape) <= WHOLE_BYTES * prod(shape) for room in whole for shape in ((64, 64), (64, 512)))
