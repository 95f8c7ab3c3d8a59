"""Torch functions that take parameters for what they are, not for their values: autograd's, hooks, torch.func,
pickling, torch.nn.utils. `ROWS` names each of them, and what holds: as plain PyTorch, or the error that it raises."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad, functional, graph
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

import executor
from executor.capture import capture_module
from executor.memory.gradients import ChunkGradients
from executor.recording.record import record
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, ModelError

Act = Callable[[nn.Module, Any, torch.optim.Optimizer], Any]
PLAIN = ""  # as plain PyTorch: the same results, and the same parameters after them and after two more steps
WRITTEN = "written outside the optimizer"
NOT_IN_GRAD = "is not in .grad"
TRANSFORM = "inside a transform of torch.func"


def weights(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def first(model: nn.Module) -> nn.Parameter:
    return weights(model)[0]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch)


def act_on_both(run: Any, act: Act, *, iterations: int) -> None:
    for _ in range(iterations):
        batch = next(run.batches)
        act(run.model, batch, run.optimizer)
        act(run.reference.model, batch, run.reference.optimizer)


def assert_equal(run: Any) -> None:
    """Parameters are plain PyTorch's to the bit."""
    values = run.model.state_dict()
    assert all(torch.equal(values[name], p.detach()) for name, p in run.reference.model.named_parameters())


def end(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def trained(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    losses = []
    for _ in range(2):
        loss = loss_of(model, batch)
        loss.backward()
        end(optimizer)
        losses.append(loss.detach())
    return losses


# -- autograd ---------------------------------------------------------------------------------------------------------


def only(chosen: Callable[[nn.Module], Sequence[Any]]) -> Act:
    """A backward for some inputs, and a step."""

    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, batch).backward(inputs=chosen(model))
        end(optimizer)

    return act


def backward_of_autograd(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward([loss_of(model, batch)], inputs=weights(model))
    end(optimizer)


def gradients(chosen: Callable[[nn.Module], Any], **options: Any) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [g.clone() for g in torch.autograd.grad(loss_of(model, batch), chosen(model), **options)]

    return act


def gradients_of_a_part(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters that the output does not depend on give None, or zeros."""
    hidden = model.layers[0](batch["x"]).sum()
    found = torch.autograd.grad(hidden, weights(model), allow_unused=True, retain_graph=True)
    assert [g is None for g in found] == [False] * 2 + [True] * 10
    return list(torch.autograd.grad(hidden, weights(model), materialize_grads=True))


def gradients_and_step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.grad(loss_of(model, batch), weights(model))
    optimizer.step()


def gradients_by_hand(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    for parameter, gradient in zip(weights(model), torch.autograd.grad(loss_of(model, batch), weights(model))):
        parameter.grad = gradient


def of_the_input(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    x = batch["x"].clone().requires_grad_()
    model(x, batch["y"]).backward(inputs=[x])
    optimizer.step()


def edges(model: nn.Module) -> list[Any]:
    return [graph.get_gradient_edge(p) for p in model.parameters()]


def multi_hook(mode: str) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []

        def hook(given: Any) -> None:
            seen.extend(g.clone() for g in ((given,) if isinstance(given, torch.Tensor) else given))

        handle = graph.register_multi_grad_hook(weights(model), hook, mode=mode)
        loss_of(model, batch).backward()
        handle.remove()
        end(optimizer)
        return seen

    return act


def node_hooks(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[int]:
    calls: list[int] = []
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in weights(model)]
    for number, node in enumerate(nodes):
        node.register_prehook(lambda *_, number=number: calls.append(number))
    loss_of(model, batch).backward()
    end(optimizer)
    return sorted(calls)


def tensor_hook(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    handle = first(model).register_hook(lambda g: 0.5 * g)
    loss_of(model, batch).backward()
    handle.remove()
    end(optimizer)


def late_hook(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    first(model).register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
    loss_of(model, batch).backward()


def module_hooks(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    part = model.layers[5]
    handles = [
        part.register_full_backward_pre_hook(lambda _, g: seen.append(g[0].clone())),
        part.register_full_backward_hook(lambda _, __, g: seen.append(g[0].clone())),
    ]
    loss_of(model, batch).backward()
    for handle in handles:
        handle.remove()
    end(optimizer)
    return seen


def dual(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Any:
    with forward_ad.dual_level():
        made = forward_ad.make_dual(first(model), torch.ones(first(model).shape))
        return [forward_ad.unpack_dual((made**2).sum()).tangent]


# -- torch.func, and modules with other parameters --------------------------------------------------------------------


def called_with(values: Callable[[nn.Module], dict[str, torch.Tensor]]) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        with torch.no_grad():
            return [torch.func.functional_call(model, values(model), kwargs=batch)]

    return act


def called_with_its_own(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    torch.func.functional_call(model, dict(model.named_parameters()), kwargs=batch).backward()
    end(optimizer)


def transformed(values: Callable[[nn.Module], dict[str, torch.Tensor]]) -> Act:
    return lambda model, batch, optimizer: torch.func.grad(
        lambda w: torch.func.functional_call(model, w, kwargs=batch)
    )(values(model))


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def of(transform: Callable[..., Any]) -> Act:
    return lambda model, batch, optimizer: [transform(lambda w: (w * w).sum())(first(model))]


def stacked(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return list(torch.func.stack_module_state([model.layers[0], model.layers[0]])[0].values())


class Half(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 0.5 * value


def parametrized(change: Callable[[nn.Module], object]) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        torch.manual_seed(0)
        change(model.layers[0])
        torch.manual_seed(0)
        return [*trained(model, batch, optimizer), model.layers[0].weight.detach()]

    return act


# -- copies and writes ------------------------------------------------------------------------------------------------


def of_first(function: Callable[[nn.Parameter], Any]) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Any:
        with torch.no_grad():
            return [function(first(model))]

    return act


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def changed(function: Callable[[nn.Module], Any]) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            function(model)

    return act


def after_backward(function: Callable[[list[nn.Parameter]], Any]) -> Act:
    def act(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
        loss_of(model, batch).backward()
        function(weights(model))

    return act


ROWS: dict[str, tuple[Act, str]] = {
    "Tensor.backward(inputs=all)": (only(weights), PLAIN),
    "Tensor.backward(inputs=some)": (only(lambda m: weights(m)[:4]), PLAIN),
    "Tensor.backward(inputs=others)": (only(lambda m: weights(m)[-2:]), PLAIN),
    "Tensor.backward(inputs=edges)": (only(edges), PLAIN),
    "autograd.backward": (backward_of_autograd, PLAIN),
    "autograd.grad": (gradients(weights), PLAIN),
    "autograd.grad of one": (gradients(first), PLAIN),
    "autograd.grad(allow_unused, materialize_grads)": (gradients_of_a_part, PLAIN),
    "autograd.grad of an edge": (gradients(lambda m: graph.get_gradient_edge(first(m))), PLAIN),
    "autograd.grad, then step()": (gradients_and_step, "would train nothing"),
    "autograd.grad, then p.grad =": (gradients_by_hand, "cannot be set"),
    "Tensor.backward(inputs=[x]), then step()": (of_the_input, "would train nothing"),
    "autograd.functional": (lambda m, b, o: [functional.jacobian(lambda w: w.sum(0), first(m))], PLAIN),
    "autograd.forward_ad": (dual, PLAIN),
    "graph.register_multi_grad_hook": (multi_hook("all"), PLAIN),
    "graph.register_multi_grad_hook, any": (multi_hook("any"), PLAIN),
    "Tensor.expand_as: a node's hooks": (node_hooks, PLAIN),
    "Tensor.register_hook": (tensor_hook, PLAIN),
    "Tensor.register_post_accumulate_grad_hook": (late_hook, r"not in \.grad inside a backward.*update='eager'"),
    "Tensor.retain_grad": (lambda m, b, o: (first(m).retain_grad(), trained(m, b, o))[1], PLAIN),
    "Module.register_full_backward_hook": (module_hooks, PLAIN),
    "func.functional_call": (called_with_its_own, PLAIN),
    "func.functional_call with copies": (called_with(copies), PLAIN),
    "func.functional_call with other values": (
        called_with(lambda m: {k: v / 2 for k, v in copies(m).items()}),
        PLAIN,
    ),
    "func.grad of the model": (transformed(lambda m: dict(m.named_parameters())), TRANSFORM),
    "func.grad of the model with copies": (transformed(copies), TRANSFORM),
    "func.grad": (of(torch.func.grad), TRANSFORM),
    "func.jacrev": (of(torch.func.jacrev), TRANSFORM),
    "func.jacfwd": (of(torch.func.jacfwd), TRANSFORM),
    "func.hessian": (of(torch.func.hessian), TRANSFORM),
    "func.vmap": (of(torch.func.vmap), TRANSFORM),
    "func.vjp": (lambda m, b, o: torch.func.vjp(torch.sum, first(m)), TRANSFORM),
    "func.jvp": (lambda m, b, o: torch.func.jvp(torch.sum, (first(m),), (first(m).detach(),)), TRANSFORM),
    "func.stack_module_state": (stacked, PLAIN),
    "parametrize.register_parametrization": (
        parametrized(lambda m: parametrize.register_parametrization(m, "weight", Half())),
        PLAIN,
    ),
    "parametrizations.spectral_norm": (parametrized(parametrizations.spectral_norm), PLAIN),
    "parametrizations.orthogonal": (parametrized(parametrizations.orthogonal), WRITTEN),
    "parametrizations.weight_norm": (parametrized(parametrizations.weight_norm), "Creating a Parameter from"),
    "prune.l1_unstructured": (parametrized(lambda m: prune.l1_unstructured(m, "weight", amount=0.5)), PLAIN),
    "Module.weight = a new parameter": (
        parametrized(lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(m.weight.shape)))),
        PLAIN,  # which no optimizer has
    ),
    "pickle of a parameter": (of_first(lambda p: pickle.loads(pickle.dumps(p))), PLAIN),
    "pickle of its data": (of_first(lambda p: pickle.loads(pickle.dumps(p.data))), PLAIN),
    "torch.save of a parameter": (of_first(saved), PLAIN),
    "torch.save of its data": (of_first(lambda p: saved({"p": p.detach().cpu()})["p"]), PLAIN),
    "pickle of the model": (changed(pickle.dumps), "cannot be pickled or copied"),
    "torch.save of the model": (changed(saved), "cannot be pickled or copied"),
    "torch.save of a part": (changed(lambda m: saved(m.layers[0])), "cannot be pickled or copied"),
    "copy.copy of a parameter": (of_first(copy.copy), PLAIN),
    "copy.deepcopy of a parameter": (of_first(copy.deepcopy), PLAIN),
    "copy.deepcopy of its data": (of_first(lambda p: copy.deepcopy(p.data)), PLAIN),
    "copy.copy of the model": (changed(copy.copy), "cannot be pickled or copied"),
    "copy.deepcopy of the model": (changed(copy.deepcopy), "into a second model"),
    "swa_utils.AveragedModel": (changed(torch.optim.swa_utils.AveragedModel), "into a second model"),
    "nn.Parameter(p)": (of_first(nn.Parameter), "Creating a Parameter from"),
    "nn.Parameter(p.data)": (of_first(lambda p: nn.Parameter(p.data)), PLAIN),
    "Tensor.as_subclass": (of_first(lambda p: p.as_subclass(torch.Tensor)), PLAIN),
    "Tensor.data_ptr": (of_first(lambda p: p.data_ptr()), "moves with its chunk"),
    "is, in a set": (of_first(lambda p: torch.tensor([p is p, p in {p}, torch.equal(p, p)])), PLAIN),
    "utils.parameters_to_vector": (changed(lambda m: utils.parameters_to_vector(m.parameters())), PLAIN),
    "utils.vector_to_parameters": (
        changed(lambda m: utils.vector_to_parameters(torch.zeros(10**5), m.parameters())),
        WRITTEN,
    ),
    "utils.clip_grad_norm_": (after_backward(lambda ps: utils.clip_grad_norm_(ps, 1.0)), NOT_IN_GRAD),
    "utils.clip_grad_value_": (after_backward(lambda ps: utils.clip_grad_value_(ps, 1.0)), NOT_IN_GRAD),
    "utils.clip_grads_with_norm_": (
        after_backward(lambda ps: utils.clip_grads_with_norm_(ps, 1.0, torch.ones(()))),
        NOT_IN_GRAD,
    ),
    "utils.get_total_norm": (after_backward(lambda ps: utils.get_total_norm([p.grad for p in ps])), NOT_IN_GRAD),
    "another optimizer": (after_backward(lambda ps: torch.optim.SGD(ps, lr=0.1).step()), NOT_IN_GRAD),
    "nn.init": (changed(lambda m: nn.init.kaiming_uniform_(first(m))), WRITTEN),
    "nn.init of a module": (changed(lambda m: m.layers[0].reset_parameters()), WRITTEN),
    "Tensor.set_": (changed(lambda m: first(m).set_(torch.zeros(3))), WRITTEN),
    "Tensor.share_memory_": (changed(lambda m: first(m).share_memory_()), WRITTEN),
    "out=p": (changed(lambda m: torch.add(torch.ones(64, 24), 1, out=first(m))), WRITTEN),
    "out=p.data": (changed(lambda m: torch.add(torch.ones(64, 24), 1, out=first(m).data)), WRITTEN),
    "inplace=True": (changed(lambda m: F.relu(first(m), inplace=True)), WRITTEN),
    "torch.ops": (changed(lambda m: torch.ops.aten.mul_.Tensor(first(m), 2.0)), WRITTEN),
    "torch._foreach_*_": (changed(lambda m: torch._foreach_mul_(weights(m), 2.0)), WRITTEN),
    "torch._foreach_*_ of data": (changed(lambda m: torch._foreach_mul_([p.data for p in weights(m)], 2.0)), WRITTEN),
    "parts of data": (changed(lambda m: first(m).data.chunk(2)[0].zero_()), WRITTEN),
    "torch._foreach_copy_ from p": (
        of_first(lambda p: torch._foreach_copy_([torch.zeros(p.shape)], [p])[0]),
        PLAIN,
    ),
    "torch.utils.swap_tensors": (
        changed(lambda m: torch.utils.swap_tensors(first(m), nn.Parameter(torch.zeros(64, 24)))),
        "Cannot swap t1",
    ),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward-mode autograd
@pytest.mark.parametrize("row", ROWS)
def test_a_function_of_parameters(kit: Any, start: Callable[..., Any], row: str) -> None:
    act, message = ROWS[row]
    run = start("mlp", "tide")
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
    batch = next(run.batches)
    if message:
        before = run.model.state_dict()
        with pytest.raises((ContractError, RuntimeError), match=message):
            act(run.model, batch, run.optimizer)
        assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
        return
    mine, theirs = (act(run.model, batch, run.optimizer), act(run.reference.model, batch, run.reference.optimizer))
    for a, b in zip(mine or (), theirs or (), strict=True):
        if isinstance(b, torch.Tensor):
            assert kit.distance(a.detach().float(), b.detach().float()) <= 1e-6
        else:
            assert a == b
    values, kept = run.model.state_dict(), run.reference.model.state_dict()
    assert all(kit.distance(values[name], value) <= 1e-6 for name, value in kept.items())
    run.optimizer.zero_grad()
    run.reference.optimizer.zero_grad()
    losses = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_subsets_are_micro_batches(kit: Any, start: Callable[..., Any]) -> None:
    """Two backwards of one forward, each for half of the parameters, under a plan for two micro-batches."""
    run = start("mlp", "tide", micro_batches=2)
    for _ in range(3):
        batch = next(run.batches)
        for model in (run.model, run.reference.model):
            loss = kit.loss_of(model, batch)
            loss.backward(inputs=weights(model)[:4], retain_graph=True)
            loss.backward(inputs=weights(model)[4:])
        end(run.optimizer)
        run.reference.step()
    assert_equal(run)


def test_gradients_of_parameters_under_loss_scaling(kit: Any, start: Callable[..., Any]) -> None:
    """They would be 2^16 times as large."""
    run = start("mlp", "tide", dtype=torch.float16)
    loss = kit.loss_of(run.model, next(run.batches))
    with pytest.raises(ContractError, match="multiplied by the scale"):
        torch.autograd.grad(loss, weights(run.model))
    loss.backward()
    run.optimizer.step()


def test_a_step_that_would_train_nothing(kit: Any, start: Callable[..., Any]) -> None:
    """After a backward that gave no parameter a gradient, `step()` raises; `zero_grad()` begins the iteration anew."""
    run = start("mlp", "tide")
    for _ in range(2):
        x = next(run.batches)["x"].requires_grad_()
        torch.autograd.grad(run.model(x, torch.zeros_like(x)), x)
        with pytest.raises(ContractError, match="no parameter got a gradient in the iteration's 1 backward;"):
            run.optimizer.step()
        run.optimizer.zero_grad()
        run.optimizer.step()  # without a backward: nothing happens
        kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=1, micro_batches=1)
    assert_equal(run)


def test_values_in_transforms(kit: Any, start: Callable[..., Any]) -> None:
    """torch.func reads what it wraps below torch functions: without the refusal, a gradient in place of the values."""
    run = start("mlp", "tide")
    kit.loss_of(run.model, next(run.batches)).backward()
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises(ContractError, match=f"'layers.0.weight' is read {TRANSFORM}"):
            transform(lambda w: (w * w).sum())(first(run.model))
    assert torch.func.vmap(lambda x: 2 * x)(torch.ones(3)).tolist() == [2, 2, 2]


HOOKS: dict[str, Callable[[nn.Parameter], None]] = {
    "changes it": lambda p: (p.grad.mul_(0.5), None)[1],
    "replaces it": lambda p: setattr(p, "grad", 0.5 * p.grad),
    "drops it": lambda p: setattr(p, "grad", None),
    "looks at it": lambda p: (p.grad.norm(), None)[1],
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("update", ["step", "eager"])
def test_a_hook_from_before_prepare(kit: Any, update: str, hook: str) -> None:
    """It runs before the gradient leaves for its chunk: as plain PyTorch."""
    model, draw = kit.build("mlp")
    twin = copy.deepcopy(model)
    batches = kit.batches(draw)
    plan = kit.tight_plan("tide", kit.workload_of(model, next(batches)), Settings(update=update, clip=False))
    for each in (model, twin):
        weights(each)[2].register_post_accumulate_grad_hook(HOOKS[hook])
    spec = executor.AdamW(lr=1e-2, weight_decay=0.1, eager=update == "eager")
    model, optimizer = executor.prepare(model, plan, spec)
    reference = kit.Reference(twin, 1e-2, 0.1, None)
    mine, theirs = kit.train_both(model, reference, optimizer, batches, steps=3, micro_batches=1)
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert optimizer.session.deviations == (3 if hook == "drops it" else 0)
    optimizer.session.close(restore=False)


@pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kit: Any, embedding: Any) -> None:
    """Refused by capture and record, and by a session whose plan was made for the same layer with sparse=False."""

    def model(sparse: bool) -> nn.Module:
        return nn.Sequential(embedding(20, 8, sparse=sparse), nn.Linear(8, 4))

    def mean(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch).square().mean()

    batch, machine = torch.zeros(2, 3, dtype=torch.int64), kit.small_machine(10**7)
    with pytest.raises(ModelError, match=r"makes a sparse tensor.*sparse=False"):
        capture_module(model(True), batch, name="net", loss=mean)
    with pytest.raises(ModelError, match=r"makes a sparse tensor.*sparse=False"):
        record(model(True), [batch], machine, name="net", loss=mean)
    plan = kit.tight_plan("tide", capture_module(model(False), batch, name="net", loss=mean), Settings(clip=False))
    prepared, optimizer = executor.prepare(model(True), plan, executor.AdamW(), check=False)
    with pytest.raises(ContractError, match=r"the gradient of '0\.weight' is sparse.*sparse=False"):
        mean(prepared, batch).backward()
    optimizer.session.close(restore=False)


def test_a_plain_model_beside_may_have_sparse_gradients(start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")
    beside = nn.Embedding(8, 4, sparse=True)
    loss = run.model(**next(run.batches))
    beside(torch.arange(3)).sum().backward()
    torch.optim.SparseAdam(beside.parameters()).step()
    loss.backward()
    run.optimizer.step()
    assert run.session.deviations == 0


def by_gradients(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """PGD: two steps towards a larger loss, then the loss of what came out."""
    x = batch["x"]
    for _ in range(2):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x, batch["y"]), x)
        x = x + 0.1 * slope.sign()
    optimizer.zero_grad()
    model(x.detach(), batch["y"]).backward()
    end(optimizer)


def by_backwards(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """PGD as it is mostly written: the parameters get gradients on the way, which are dropped."""
    x = batch["x"]
    for _ in range(2):
        x = x.detach().requires_grad_()
        model(x, batch["y"]).backward()
        assert x.grad is not None
        x = x + 0.1 * x.grad.sign()
    optimizer.zero_grad()
    model(x.detach(), batch["y"]).backward()
    end(optimizer)


def critic(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """WGAN-GP: two losses and a gradient penalty, whose slope is a backward too."""
    real, fake = batch["x"], batch["x"].flip(0)
    model(real, batch["y"]).backward()
    (-model(fake, batch["y"])).backward()
    between = (0.5 * (real + fake)).requires_grad_()
    (slope,) = torch.autograd.grad(model(between, batch["y"]), between, create_graph=True)
    ((slope.norm(dim=1) - 1) ** 2).mean().backward()
    end(optimizer)


@pytest.mark.parametrize(("policy", "late_s"), [("zero_offload", 0.0), ("zero_offload", 0.02), ("all_on_gpu", 0.0)])
@pytest.mark.parametrize(("act", "backwards"), [(by_gradients, 3), (critic, 4)])
def test_backwards_that_count_as_micro_batches(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, act: Act, backwards: int, policy: str, late_s: float
) -> None:
    """Gradients whose step has not run where the plan is left are added before those that come later."""
    add = ChunkGradients.add_on_host

    def add_late(gradients: ChunkGradients, chunk: int, list_name: str | None) -> None:
        time.sleep(late_s)
        add(gradients, chunk, list_name)

    monkeypatch.setattr(ChunkGradients, "add_on_host", add_late)
    run = start("mlp", policy, micro_batches=backwards)
    act_on_both(run, act, iterations=3)
    assert_equal(run)


@pytest.mark.parametrize(
    ("policy", "act", "backwards"),
    [
        pytest.param(policy, act, backwards, marks=[pytest.mark.whole] * ((turn + number) % 2))
        for turn, (act, backwards) in enumerate(((by_gradients, 3), (by_backwards, 2), (by_backwards, 3)))
        for number, policy in enumerate(("tide", "patrickstar", "optimal"))
    ],
)
def test_a_backward_that_reaches_the_batch_under_a_tight_plan(
    start: Callable[..., Any], policy: str, act: Act, backwards: int
) -> None:
    """The first layer's weight is read in its backward, where a plan for a batch without gradients does not have it.
    After three iterations off plan there is a new plan, for the backwards between two `zero_grad()`."""
    run = start("mlp", policy, micro_batches=backwards)
    act_on_both(run, act, iterations=5)
    assert_equal(run)


@pytest.mark.parametrize("policy", ["tide", "patrickstar", "optimal"])
def test_a_double_backward_where_parameters_move(start: Callable[..., Any], policy: str) -> None:
    run = start("mlp", policy, micro_batches=4)
    refusal = rf"create_graph=True, and the plan of {policy} moves.*\(zero_offload\)"
    for _ in range(2):  # in an iteration on plan, and in one after it
        with pytest.raises(ContractError, match=refusal):
            critic(run.model, next(run.batches), run.optimizer)
        run.optimizer.zero_grad()
        with pytest.raises(ContractError, match=refusal):
            run.model(**next(run.batches)).backward(create_graph=True)
        run.optimizer.zero_grad()
    for _ in range(4):
        run.model(**next(run.batches)).backward()
    run.optimizer.step()


def probe(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> None:
    """A look at gradients before the usual iteration."""
    torch.autograd.grad(model(**batch), weights(model))
    model(**batch).backward()
    end(optimizer)


def adversary(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer, *, cleared_first: bool) -> None:
    """The discriminator of a GAN: two backwards, a step, and a backward through it that is the generator's."""
    if cleared_first:
        optimizer.zero_grad()
    model(**batch).backward(inputs=weights(model))
    model(batch["x"].flip(0), batch["y"]).backward(inputs=weights(model))
    optimizer.step()
    if not cleared_first:
        optimizer.zero_grad()
    x = batch["x"].clone().requires_grad_()
    model(x, batch["y"]).backward(inputs=[x])
    assert x.grad is not None


@pytest.mark.parametrize("policy", ["tide", "zero_offload"])
@pytest.mark.parametrize(
    ("act", "micro_batches"),
    [
        (probe, 1),
        (functools.partial(adversary, cleared_first=True), 2),
        (functools.partial(adversary, cleared_first=False), 2),
    ],
)
def test_a_backward_that_gives_no_parameter_a_gradient_is_no_micro_batch(
    start: Callable[..., Any], policy: str, act: Act, micro_batches: int
) -> None:
    run = start("mlp", policy, micro_batches=micro_batches)
    act_on_both(run, act, iterations=5)
    run.optimizer.zero_grad()
    assert_equal(run)


class Writer(nn.Module):
    """Writes its own parameters in its forward."""

    def __init__(self, write: Callable[[nn.Embedding, nn.Linear], Any], max_norm: float | None) -> None:
        super().__init__()
        self.rows = nn.Embedding(24, 16, max_norm=max_norm)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.write = write

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.write(self.rows, self.layers[1])
        x = self.rows(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def without_grad(_: nn.Embedding, layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


WRITES: dict[str, tuple[Callable[[nn.Embedding, nn.Linear], Any], float | None]] = {
    "rows": (lambda rows, layer: None, 0.1),
    "layers.1": (without_grad, None),
    "layers.1 by data": (lambda rows, layer: layer.weight.data.clamp_(-0.1, 0.1), None),
    "layers.1, data set": (lambda rows, layer: setattr(layer.weight, "data", torch.zeros(16, 16)), None),
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_writes_a_parameter(kit: Any, name: str, recorded: bool) -> None:
    """The working copy is written, the master copy is not: the write would be lost at the next update."""
    write, max_norm = WRITES[name]
    torch.manual_seed(0)
    plain, batch = Writer(lambda rows, layer: None, None), (torch.arange(24).reshape(2, 12),)
    model = Writer(write, max_norm)
    model.load_state_dict(plain.state_dict())

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return module(*batch)

    names = rf"parameter '{name[:8].rstrip(' ,')}\.weight' (has been|is) written"
    if recorded:
        with pytest.raises(ContractError, match=names):
            record(model, [batch], kit.small_machine(10**7), name="net", loss=loss)
        return
    workload = capture_module(plain, batch, name="net", loss=loss)
    plan = kit.tight_plan("tide", workload, Settings(clip=False))
    prepared, optimizer = executor.prepare(model, plan, executor.AdamW(), check=False)
    for _ in range(2):
        with pytest.raises(ContractError, match=names):
            loss(prepared, batch).backward()
        optimizer.zero_grad()
    optimizer.session.close(restore=False)


def test_an_array_of_a_parameter_is_read_only(start: Callable[..., Any]) -> None:
    run = start("mlp", "tide")
    for array in (
        first(run.model).detach().numpy(),
        first(run.model).data[0].numpy(),
        np.asarray(first(run.model).data),
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
