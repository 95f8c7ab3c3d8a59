"""session.step(micro_batches): the engine runs the blocks; results and moments are those of the usual loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thinned import by_turns
from torch import nn

import executor
from executor.capture import capture_module
from executor.driving.borders import Borders, find_blocks, shared_part
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, ModelError
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.mixing import block_names, mix_blocks, offload_blocks
from pstar_sim.workload.workload import repeat_micro_batch

TOLERANCE = 1e-6


def compare(run: Any, kit: Any, *, steps: int, micro_batches: int, loss: Any = None) -> list[executor.StepResult]:
    """`steps` iterations of session.step beside the plain loop: losses, parameters, moments; nothing off plan."""
    results = []
    loss_of = loss or kit.loss_of
    options = {} if loss is None else {"loss": loss}
    for _ in range(steps):
        rows = [next(run.batches) for _ in range(micro_batches)]
        results.append(run.session.step(rows, **options))
        theirs = 0.0
        for row in rows:
            plain = loss_of(run.reference.model, row) / micro_batches
            plain.backward()
            run.reference.after_backward()
            theirs += float(plain.detach())
        run.reference.step()
        assert results[-1].loss == pytest.approx(theirs, rel=TOLERANCE)
    assert run.session.deviations == 0, list(run.session.deviation_log)
    named = dict(run.model.named_parameters())
    mine = run.optimizer.state_dict()["state"]
    for number, (name, p) in enumerate(run.reference.model.named_parameters()):
        assert kit.distance(named[name].detach(), p.detach()) <= TOLERANCE, name
        state = run.reference.optimizer.state[p]
        for key in ("exp_avg", "exp_avg_sq"):
            assert kit.distance(mine[number][key], state[key]) <= TOLERANCE, (name, key)
    return results


@pytest.mark.parametrize(
    ("name", "checkpointing", "policy"),
    by_turns(
        [("gpt2",), ("llama",), ("bert",), ("mlp",)],
        [(False, "tide"), (False, "zero_offload"), (True, "tide"), (True, "zero_offload")],
    ),
)
def test_blocks_one_by_one_are_the_loop(
    start: Callable[..., Any], kit: Any, name: str, checkpointing: bool, policy: str
) -> None:
    """Four rows of 16 without --whole."""
    run = start(name, policy, checkpointing=checkpointing, micro_batches=2, clip=0.5, layers=3)
    results = compare(run, kit, steps=3, micro_batches=2)
    assert [r.blocks for r in results] == [6 if name == "mlp" else 3] * 3
    assert not results[0].whole
    assert results[-1].grad_norm == run.session.grad_norm > 0  # known when the updates have begun


def test_fp16_with_its_loss_scale_is_the_loop_to_the_bit(start: Callable[..., Any], kit: Any) -> None:
    ours, loop = (start("gpt2", "tide", dtype=torch.float16, micro_batches=2, clip=0.5) for _ in range(2))
    for _ in range(2):
        rows = [next(ours.batches) for _ in range(2)]
        result = ours.session.step(rows)
        losses = []
        for row in rows:
            loss = kit.loss_of(loop.model, row) / 2
            loss.backward()
            losses.append(loss.detach())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        assert result.loss == float(torch.stack(losses).sum()) and result.blocks == kit.LAYERS
    theirs = dict(loop.model.named_parameters())
    for name, p in ours.model.named_parameters():
        assert torch.equal(p.detach().clone(), theirs[name].detach().clone()), name
    assert ours.session.deviations == 0


def test_the_norm_is_that_of_clip_grad_norm(start: Callable[..., Any], kit: Any) -> None:
    run = start("gpt2", "tide", clip=0.1)
    batch = next(run.batches)
    result = run.session.step([batch])
    kit.loss_of(run.reference.model, batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(list(run.reference.model.parameters()), 0.1)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert result.tokens == kit.BATCH * kit.SEQUENCE
    assert start("mlp", "tide").session.step([next(kit.batches(kit.build("mlp")[1]))]).grad_norm is None


def sequential(start: Callable[..., Any], kit: Any, model: nn.Module) -> Any:
    """A prepared nn.Sequential, whose loss the loop computes."""

    def draw(generator: torch.Generator) -> Any:
        return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)

    twin = copy.deepcopy(model)
    w = capture_module(model, draw(torch.Generator().manual_seed(3)), name="sequential", loss=error)
    plan = kit.tight_plan("tide", w, Settings(clip=False))
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, weight_decay=0.1), watchdog_s=5.0)
    return kit.Run(model, optimizer, kit.Reference(twin, 1e-2, 0.1, None), plan, kit.batches(draw))


def error(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def test_a_sequential_with_a_loss_of_the_loop(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 16)]
    run = sequential(start, kit, nn.Sequential(*layers))
    try:
        results = compare(run, kit, steps=3, micro_batches=1, loss=error)
        assert results[0].blocks == 3  # the ReLUs own nothing: they are glue
    finally:
        run.session.close()


class Outside(nn.Module):
    """A residual stream kept outside the blocks: what a block takes goes past it too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_model_that_cannot_be_cut_runs_whole_and_says_why(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    run = sequential(start, kit, Outside())
    try:
        results = compare(run, kit, steps=3, micro_batches=1, loss=error)
        assert results[-1].blocks == 0
        assert "is also used past it" in results[-1].whole
    finally:
        run.session.close()


def test_a_model_without_blocks_runs_whole(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    run = sequential(start, kit, nn.Linear(16, 16))
    try:
        assert compare(run, kit, steps=2, micro_batches=1, loss=error)[0].whole == "the model has no list of blocks"
    finally:
        run.session.close()


class Shared(nn.Module):
    """An encoder whose output every block takes, and an output of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Takes() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.encoder(x))
        side = memory
        for layer in self.layers:
            x, side = layer(x, memory=memory, side=side)
        return x + side


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor, side: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return torch.tanh(self.inner(x)) * memory, side + x


def test_a_tensor_that_all_blocks_take_adds_up_once(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    run = sequential(start, kit, Shared())
    try:
        assert compare(run, kit, steps=2, micro_batches=1, loss=error)[0].blocks == 3
    finally:
        run.session.close()


def test_parts_of_a_forward_and_what_leads_from_one_to_the_next() -> None:
    """x -> 2x -> block a -> +1 -> block b -> sum: parts "before a", a, "before b", b, tail; by hand."""
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(a.weight, 3.0)
    nn.init.constant_(b.weight, 5.0)
    x = torch.tensor([[7.0]], requires_grad=True)
    with Borders(nn.ModuleList([a, b]), {"a": a, "b": b}).recording() as tape:
        tape.end(b(a(2 * x) + 1).sum())
    assert [p.name for p in tape.parts] == ["before a", "a", "before b", "b", "tail"]
    assert shared_part(tape) is None
    seen = []
    while tape.parts:
        tape.back()
        seen.append((a.weight.grad is not None, b.weight.grad is not None, x.grad is not None))
    assert seen == [(False,) * 3, (False, True, False), (False, True, False), (True, True, False), (True, True, True)]
    # loss = 5 (3 * 2x + 1): d/dx = 30, d/da = 5 * 2x = 70, d/db = 6x + 1 = 43
    assert [float(t.grad) for t in (x, a.weight, b.weight)] == [30.0, 70.0, 43.0]  # type: ignore[arg-type]


class Shift(nn.Module):
    """Adds its parameter; saves nothing, so that its input may change in place."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def test_a_tensor_changed_in_place_is_another() -> None:
    a, b = Shift(), Shift()
    x = torch.tensor([1.0], requires_grad=True)
    borders = Borders(nn.ModuleList([a, b]), {"a": a, "b": b})
    with borders.recording() as tape:
        y = 2 * x
        y += a(y)
        tape.end(b(y).sum())
    assert shared_part(tape) == ("before a", "before b")

    with borders.recording() as tape:
        y = a(2 * x)
        y *= 3  # of a's output alone: glue between the blocks
        tape.end(b(y).sum())
    assert shared_part(tape) is None
    while tape.parts:
        tape.back()
    assert x.grad is not None and a.by.grad is not None and (float(x.grad), float(a.by.grad)) == (6.0, 3.0)


def test_hidden_states_that_the_loss_uses_too(start: Callable[..., Any], kit: Any) -> None:
    """Outputs of blocks that the model returns besides: gradients reach each block from two sides."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(**batch, output_hidden_states=True)
        squares: torch.Tensor = sum(h.pow(2).mean() for h in output.hidden_states)
        return output.loss + 0.1 * squares

    run = start("llama", "tide", layers=3)
    run.session.state.replan_after = 0
    results = []
    for _ in range(2):
        batch = next(run.batches)
        results.append(run.session.step([batch], loss=loss))
        loss(run.reference.model, batch).backward()
        run.reference.step()
    assert [r.blocks for r in results] == [3, 3], results[0].whole
    named = dict(run.model.named_parameters())
    for name, p in run.reference.model.named_parameters():
        assert torch.equal(named[name].detach(), p.detach()), name


class Skips(nn.Module):
    """Blocks with a residual, and a skip from each block to the second after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [x]
        for number, layer in enumerate(self.layers):
            outputs.append(layer(outputs[-1] if number < 3 else outputs[-1] + outputs[-3], outputs[0]))
        return outputs[-1] + outputs[3]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.tanh(self.one(x) + first)) * first


class Keeping(Skips):
    """Keeps the outputs of its blocks on itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs = [x]
        for layer in self.layers:
            self.outputs.append(layer(self.outputs[-1] + self.outputs[len(self.outputs) // 2], x))
        return self.outputs[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_the_order_of_autograd(dtype: torch.dtype) -> None:
    """Uses of one tensor in several parts, several of them in one part, and hooks on it."""
    torch.manual_seed(0)
    model = Skips().to(dtype)
    twin = copy.deepcopy(model)
    x, seen = torch.randn(3, 16, dtype=dtype), []
    for hooked in (False, True):
        gradients = []
        for each in (model, twin):
            start = x.clone().requires_grad_()
            borders = Borders(each, dict(each.layers.named_children()) if each is model else {})
            with borders.recording() as tape:
                before = start * 3
                if hooked:
                    before.register_hook(lambda g: seen.append(g) or g / 2)
                tape.end(each(before).sum())
            assert len(tape.parts) == (1 if each is twin else 9)
            assert shared_part(tape) is None
            while tape.parts:
                tape.back()
            gradients.append([start.grad, *(p.grad for p in each.parameters())])
            borders.close()
        assert [torch.equal(a, b) for a, b in zip(*gradients)] == [True] * 21
    assert len(seen) == 2 and torch.equal(*seen)


def test_a_hook_on_a_tensor_between_blocks_scales_its_gradient_once() -> None:
    """The output y of block a goes to b and to the loss: (1 + 5) * 0.5 = 3 is the gradient of a's output."""
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(b.weight, 5.0)
    x = torch.tensor([[7.0]])
    with Borders(nn.ModuleList([a, b]), {"a": a, "b": b}).recording() as tape:
        y = a(x)
        y.register_hook(lambda g: g * 0.5)
        tape.end((y + b(y)).sum())
    while tape.parts:
        tape.back()
    assert a.weight.grad is not None and float(a.weight.grad) == 3.0 * 7


@pytest.mark.parametrize("spec", ["tide", "tide:order=relay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_skips_are_the_loop_to_the_bit(kit: Any, dtype: torch.dtype, spec: str) -> None:
    torch.manual_seed(0)
    model = Skips().to(dtype)
    session, reference = begun(kit, model, spec, captured=model)
    try:
        for _ in range(3):
            rows = [(torch.randn(4, 16, dtype=dtype), torch.randn(4, 16, dtype=dtype)) for _ in range(2)]
            result, losses = session.step(rows, loss=error), []
            for row in rows:
                plain = error(reference.model, row) / 2
                plain.backward()
                reference.after_backward()
                losses.append(plain.detach())
            reference.step()
            assert result.loss == float(torch.stack(losses).sum()) and result.blocks == 5
        values = session.model.state_dict()
        assert [n for n, v in reference.model.state_dict().items() if not torch.equal(values[n], v)] == []
    finally:
        session.close(restore=False)


def begun(kit: Any, model: nn.Module, spec: str, *, captured: nn.Module) -> Any:
    """A session of two micro-batches beside its twin.

    captured: the instance of the model that the plan is made from.
    """
    twin = copy.deepcopy(model)
    dtype = next(model.parameters()).dtype
    batch = torch.zeros(4, 16, dtype=dtype), torch.zeros(4, 16, dtype=dtype)
    w = repeat_micro_batch(capture_module(captured, batch, name="skips", loss=error), 2)
    plan = find_policy(spec)(w, kit.small_machine(10**9), Settings(clip=False))
    _, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, weight_decay=0.1), watchdog_s=20.0)
    return optimizer.session, kit.Reference(twin, 1e-2, 0.1, None)


@pytest.mark.parametrize("same", [True, False])
def test_a_model_that_keeps_tensors_on_itself(kit: Any, same: bool) -> None:
    """Whether the capture has left tensors on this instance or on another, it runs depth-first and no relay: there a
    block would take what another micro-batch has kept."""
    rows = [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(2)]
    model = Keeping()
    session, _ = begun(kit, model, "tide", captured=model if same else Keeping())
    assert session.step(rows, loss=error).blocks == 5
    session.close(restore=False)
    model = Keeping()
    session, _ = begun(kit, model, "tide:order=relay", captured=model if same else Keeping())
    before = {name: value.clone() for name, value in session.model.state_dict().items()}
    with pytest.raises(ContractError, match=r"of another micro-batch, which the model keeps .* depth-first order"):
        session.step(rows, loss=error)
    assert all(torch.equal(before[name], value) for name, value in session.model.state_dict().items())
    session.close(restore=False)


def test_blocks_are_the_outermost_lists() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = nn.ModuleDict({"stem": nn.Linear(2, 2), "body": nn.ModuleList([inner, nn.Linear(2, 2)])})
    assert list(find_blocks(model)) == ["body.0", "body.1"]
    assert not find_blocks(nn.Linear(2, 2))


def test_what_step_refuses(start: Callable[..., Any], kit: Any) -> None:
    run = start("mlp", "tide")
    batch = next(run.batches)
    for given, options, word in (
        ([], {}, "one or more"),
        (batch, {}, "give \\[batch\\]"),
        ([batch, batch], {}, "was made for 1"),
        ([batch], {"order": "breadth-first"}, "not known"),
        ([batch], {"loss": lambda model, row: kit.loss_of(run.model, row)}, "the model that it is given"),
    ):
        with pytest.raises(ContractError, match=word):
            run.session.step(given, **options)
    kit.loss_of(run.model, batch).backward()
    with pytest.raises(ContractError, match="inside an iteration"):
        run.session.step([batch])
    run.optimizer.zero_grad()
    run.session.step([batch])


def test_inputs_of_blocks_on_the_host_are_for_one_micro_batch(start: Callable[..., Any], kit: Any) -> None:
    """The policy plans several; the engine runs one, and says so before anything changes."""
    model, draw = kit.build("gpt2", checkpointing=True, layers=3)
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), micro_batches=2)
    plan = find_policy("zero3_offload:checkpoints=host")(w, kit.small_machine(10**8), Settings(clip=False))
    assert plan.workload.boundaries_on_host
    run = start("gpt2", "zero3_offload", checkpointing=True, plan=plan, layers=3)
    before = run.model.state_dict()
    with pytest.raises(ContractError, match="2 micro-batches one after the other; that runs with one micro-batch only"):
        run.session.step([next(run.batches) for _ in range(2)])
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())


def test_fewer_micro_batches_and_other_shapes_are_plain_torch_too(start: Callable[..., Any], kit: Any) -> None:
    """Off plan: one micro-batch of two; then a batch of half the rows. Right results, counted."""
    run = start("gpt2", "tide", micro_batches=2)
    for rows in ([next(run.batches)], [{k: v[:1] for k, v in next(run.batches).items()}, next(run.batches)]):
        run.session.step(rows)
        for row in rows:
            (kit.loss_of(run.reference.model, row) / len(rows)).backward()
        run.reference.step()
    assert run.session.deviations == 2
    named = dict(run.model.named_parameters())
    for name, p in run.reference.model.named_parameters():
        assert kit.distance(named[name].detach(), p.detach()) <= 2e-5, name


def test_a_scheduler_and_the_usual_loop_go_together(start: Callable[..., Any], kit: Any) -> None:
    run = start("mlp", "tide")
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, start_factor=0.5, total_iters=2)
    other = torch.optim.lr_scheduler.LinearLR(run.reference.optimizer, start_factor=0.5, total_iters=2)
    for k in range(4):
        batch = next(run.batches)
        if k % 2:
            kit.loss_of(run.model, batch).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        else:
            run.session.step([batch])
        kit.loss_of(run.reference.model, batch).backward()
        run.reference.step()
        schedule.step()
        other.step()
    assert run.session.deviations == 0
    named = dict(run.model.named_parameters())
    for name, p in run.reference.model.named_parameters():
        assert kit.distance(named[name].detach(), p.detach()) <= TOLERANCE, name


@pytest.mark.parametrize(("name", "checkpointing"), [("llama", False), ("gpt2", True)])
def test_it_holds_no_more_memory_than_the_plan_has(
    start: Callable[..., Any], kit: Any, name: str, checkpointing: bool
) -> None:
    """Non-model bytes of every moment, counted operator by operator, against those of the trace of a whole backward."""
    run = start(name, "tide", checkpointing=checkpointing)
    rows = iter([next(run.batches) for _ in range(3)])
    run.session.step([next(rows)])
    counted = run.session.measure_iteration(lambda: run.session.step([next(rows)]))
    over = [a - m.peak_bytes for a, m in zip(counted.non_model_bytes, run.plan.workload.moments)]
    assert counted.on_plan
    assert max(over) <= 8, over  # the tape's scalar, and the loss


def test_blocks_that_the_plan_recomputes_and_offloads(start: Callable[..., Any], kit: Any) -> None:
    """Block 0 recomputed, block 1 offloaded, block 2 kept: the stashes leave as they do in the loop."""
    kept, recomputed = (
        kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
        for model, draw in (kit.build("gpt2", checkpointing=c, layers=3) for c in (False, True))
    )
    blocks = block_names(kept)
    w = offload_blocks(mix_blocks(recomputed, kept, blocks[1:]), [blocks[1]])
    run = start("gpt2", "tide", plan=kit.tight_plan("tide", w, Settings(clip=True)), clip=1.0, layers=3)
    compare(run, kit, steps=3, micro_batches=1)
    reports = run.session.state.run.stashes.reports
    assert [r.block for r in reports] == [s.block for s in run.plan.workload.stashes] == [blocks[1]]
    assert all(r.freed_bytes == r.moved_bytes == r.planned_bytes > 0 for r in reports)


class Twice(nn.Module):
    """Each layer is called twice: its parameters have gradients in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, *self.layers):
            x = torch.tanh(layer(x))
        return x


def test_blocks_called_twice_give_their_gradient_once(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    run = sequential(start, kit, Twice())
    try:
        assert compare(run, kit, steps=2, micro_batches=1, loss=error)[0].blocks == 6
    finally:
        run.session.close()


def test_frozen_blocks_in_front_have_no_backward(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16))
    model[0].requires_grad_(False)
    run = sequential(start, kit, model)
    try:
        results = [run.session.step([next(run.batches)], loss=error) for _ in range(2)]
        assert results[0].blocks == 3 and not results[0].whole and run.session.deviations == 0
    finally:
        run.session.close()


def test_a_micro_batch_that_raises_can_be_dropped(start: Callable[..., Any], kit: Any) -> None:
    run = start("gpt2", "tide", micro_batches=2)
    good = [next(run.batches) for _ in range(2)]
    run.session.step(good)
    with pytest.raises(ModelError):
        run.session.step([good[0], {"nonsense": 1}])
    run.optimizer.zero_grad()
    run.session.step(good)
    for _ in range(2):
        for row in good:
            (kit.loss_of(run.reference.model, row) / 2).backward()
        run.reference.step()
    named = dict(run.model.named_parameters())
    for name, p in run.reference.model.named_parameters():
        assert kit.distance(named[name].detach(), p.detach()) <= TOLERANCE, name
