"""The plan's own choice for each block, carried out: kept, recomputed, offloaded, beside plain torch.

The models are the kit's, three blocks each. Block 1 is offloaded, block 0 recomputed, block 2 kept, or what a test
says.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import executor
from executor.activations.planned import RunOfBlocks, carry_out, recomputing
from executor.capture import capture_module
from executor.devices.virtual_streams import VirtualStreams
from executor.models import enable_checkpointing
from executor.moments.live_bytes import LiveStorages
from executor.queues.serial import SerialQueues
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.core.step import COPIES
from pstar_sim.errors import PlanError
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.mixing import block_names, mix_blocks, offload_blocks
from pstar_sim.workload.workload import Workload, repeat_micro_batch

THREE = {0: "recompute", 1: "offload", 2: "keep"}
OFFLOAD = {1: "offload"}
LAYERS = len(THREE)


@pytest.fixture
def start(start: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(start, layers=LAYERS)


@pytest.fixture
def planned(kit: Any) -> Callable[..., Plan]:
    """A plan for a kit model with a choice for each block (by number; the others keep), at a tight budget."""

    def make(
        name: str, how: Mapping[int, str], policy: str = "tide", *, micro_batches: int = 1, clip: bool = True
    ) -> Plan:
        w = chosen(kit, name, how)
        plan: Plan = kit.tight_plan(policy, repeat_micro_batch(w, micro_batches), Settings(clip=clip))
        return plan

    return make


@functools.lru_cache
def captured(kit: Any, name: str, checkpointing: bool) -> Workload:
    model, draw = kit.build(name, checkpointing=checkpointing, layers=LAYERS)
    w: Workload = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), name=name)
    return w


def chosen(kit: Any, name: str, how: Mapping[int, str]) -> Workload:
    kept, recomputed = (captured(kit, name, checkpointing) for checkpointing in (False, True))
    blocks = block_names(kept)
    recompute = {blocks[n] for n, choice in how.items() if choice == "recompute"}
    mixed = mix_blocks(recomputed, kept, [b for b in blocks if b not in recompute])
    return offload_blocks(mixed, [blocks[n] for n, choice in how.items() if choice == "offload"])


def same(run: Any, kit: Any) -> None:
    """Parameters and moments are those of the twin."""
    tensors = run.session.plan.workload.tensors
    theirs = dict(run.reference.model.named_parameters(remove_duplicate=False))
    for t in run.session.timetable.chunk_of:
        mine, other = run.session.reader.current_value(t), theirs[tensors[t].name]
        assert kit.distance(mine, other.detach()) < 1e-6, tensors[t].name
        state = run.reference.optimizer.state[other]
        for key, name in (("exp_avg", "momentum"), ("exp_avg_sq", "variance")):
            assert kit.distance(run.session.reader.state_value(t, name), state[key]) < 1e-5, (tensors[t].name, name)


@pytest.mark.parametrize(
    ("name", "policy", "how", "micro_batches"),
    [
        ("gpt2", "tide", THREE, 1),
        ("gpt2", "optimal", {0: "offload", 1: "offload"}, 2),
        ("gpt2", "static_partition", {1: "recompute"}, 1),
        ("llama", "static_partition", THREE, 2),
        ("llama", "optimal", OFFLOAD, 1),
        ("bert", "tide", OFFLOAD, 2),
        pytest.param("bert", "optimal", THREE, 1, marks=pytest.mark.whole),
        ("llama", "patrickstar", THREE, 1),
    ],
)
def test_parity_with_plain_torch(
    name: str, policy: str, how: dict[int, str], micro_batches: int, planned: Any, start: Any, kit: Any
) -> None:
    plan = planned(name, how, policy, micro_batches=micro_batches)
    run = start(name, policy, plan=plan, clip=1.0)
    mine, theirs = kit.train_both(
        run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=micro_batches
    )
    assert mine == pytest.approx(theirs, rel=1e-6)
    same(run, kit)
    assert run.session.deviations == 0
    reports = run.session.state.run.stashes.reports
    assert [(r.block, r.micro_batch) for r in reports] == [(s.block, s.micro_batch) for s in plan.workload.stashes]
    for r in reports:
        assert r.moved_bytes == r.planned_bytes <= r.saved_bytes
        assert r.freed_bytes == r.moved_bytes or r.block.endswith("0")  # what the model gives its first block stays


def test_moments_of_a_real_capture_are_those_of_the_mixture(kit: Any) -> None:
    """The model as the executor calls it, captured, against the mixture of two captures."""
    for name in ("gpt2", "llama", "bert"):
        w = chosen(kit, name, {0: "recompute", 1: "keep", 2: "recompute"})
        model, draw = kit.build(name, layers=LAYERS)
        with recomputing(model, w):
            real = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), name=name)
        assert [m.name for m in real.moments] == [m.name for m in w.moments]
        assert real.uses == w.uses and real.flops == w.flops
        # A figure of each (token, layer) may be counted on the other side of a block's edge.
        assert max(abs(a.peak_bytes - b.peak_bytes) for a, b in zip(real.moments, w.moments)) <= 96


def test_offload_takes_its_bytes_off_the_accelerator(planned: Any, start: Any, kit: Any) -> None:
    """Measured: no moment holds more than the plan says, the peak is lower than without by what the plan says, and what
    is copied is what the plan says."""
    peaks = {}
    for how in ({}, {0: "offload", 1: "offload"}):
        plan = planned("gpt2", how)
        run = start("gpt2", "tide", plan=plan, clip=1.0)
        kit.train_alone(run.model, run.optimizer, run.batches, 1)
        measured = run.session.measure_iteration(
            lambda run=run: kit.train_alone(run.model, run.optimizer, run.batches, 1)
        )
        assert measured.on_plan and measured.moved_bytes == plan.moved_bytes
        pairs = zip(measured.non_model_bytes, plan.workload.moments)
        assert all(seen <= moment.peak_bytes for seen, moment in pairs)
        peaks[len(how)] = (max(measured.non_model_bytes), plan.workload.peak_non_model_bytes)
    assert peaks[0][0] - peaks[2][0] == peaks[0][1] - peaks[2][1] > 0
    assert run.session.timeline().moved_bytes == plan.moved_bytes


def test_what_a_block_does_behind_its_last_unit_wants_its_bytes_before_their_step(kit: Any) -> None:
    """gpt2's dropout behind each block is differentiated in the moment before the one that waits for the stash. With
    every copy as late as it may be, that one is made then and there; nothing is copied twice, nor left out of the
    books."""
    model, draw = kit.build("gpt2", layers=LAYERS)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    batch = draw(torch.Generator().manual_seed(9))
    w = kit.workload_of(model, batch, name="gpt2")
    plan = kit.tight_plan("tide", offload_blocks(w, block_names(w)[:2]), Settings(clip=False))

    def as_late_as_may_be(possible: Any, compute: Any, may: bool) -> int | None:
        return None if may else 0

    queues = SerialQueues(as_late_as_may_be)
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2), watchdog_s=5.0, queues=queues)
    session = optimizer.session
    ahead = []
    plain = session.state.run.stashes.move
    session.state.run.stashes.move = lambda step: ahead.append(plain(step)) or ahead[-1]
    for _ in range(3):
        kit.train_alone(model, optimizer, itertools.repeat(batch), 1)
    session.drain()
    assert session.deviations == 0
    assert max(ahead) > 0
    copied = {
        (log.iteration, log.step.id): log.copied_bytes for log in session.steps.span_log if log.step.kind in COPIES
    }
    planned = {step.id: step.bytes for step in plan.steps if step.kind in COPIES}
    for iteration in range(3):
        assert {step: size for (k, step), size in copied.items() if k == iteration} == planned
    session.close(restore=False)


def test_random_interleavings_compute_the_same(planned: Any, start: Any, kit: Any) -> None:
    plan = planned("llama", {0: "offload", 1: "offload"}, "optimal")
    results = []
    for seed in (None, 0, 1, 2):
        rng = random.Random(seed)

        def choose(possible: Any, compute: Any, may: bool, rng: random.Random = rng) -> int | None:
            if may and (not possible or rng.random() < 0.5):
                return None
            return rng.randrange(len(possible)) if possible else None

        options = {} if seed is None else {"queues": SerialQueues(choose)}
        run = start("llama", "optimal", plan=plan, clip=1.0, **options)
        results.append([kit.train_alone(run.model, run.optimizer, run.batches, 1) for _ in range(3)])
        results[-1] += [
            float(run.session.reader.current_value(t).double().sum()) for t in sorted(run.session.timetable.chunk_of)
        ]
        assert run.session.deviations == 0
    assert all(r == results[0] for r in results[1:])


def test_dropout_is_the_same_when_a_block_runs_again(kit: Any) -> None:
    """Plain torch draws each mask once; a block that is recomputed has to draw the same ones again."""
    model, draw = kit.build("gpt2", layers=LAYERS)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    batch = draw(torch.Generator().manual_seed(9))
    kept = kit.workload_of(model, batch)
    blocks = block_names(kept)
    checkpointed = copy.deepcopy(model)
    enable_checkpointing("gpt2", checkpointed)
    recomputed = kit.workload_of(checkpointed, batch)
    twin = copy.deepcopy(model)
    w = offload_blocks(mix_blocks(recomputed, kept, blocks[1:]), blocks[1:2])
    plan = kit.tight_plan("tide", w, Settings())
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, max_grad_norm=1.0), watchdog_s=5.0)
    reference = kit.Reference(twin, 1e-2, 0.01, 1.0)
    try:
        for seed in range(3):
            torch.manual_seed(seed)
            mine = kit.train_alone(model, optimizer, iter([batch]), 1)
            torch.manual_seed(seed)
            loss = kit.loss_of(twin, batch)
            loss.backward()
            reference.step()
            assert mine == float(loss.detach())
        assert optimizer.session.deviations == 0
    finally:
        optimizer.session.close(restore=False)


class OnTheCard(torch.Tensor):
    """An empty tensor that says it is on a CUDA device; made without one."""

    @staticmethod
    def __new__(cls) -> OnTheCard:
        made: OnTheCard = torch.Tensor._make_wrapper_subclass(cls, (0,), dtype=torch.float32, device="cuda:0")
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default
        return args[0]


class MadeThere(TorchFunctionMode):  # type: ignore[misc]
    """`torch.empty` on a CUDA device gives an OnTheCard."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return OnTheCard()
        return func(*args, **kwargs)


class Masked(nn.Module):
    """Its masks come from the device's generator; it runs on the host."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.generator = generator
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        self.masks.append(torch.rand(x.shape, generator=self.generator) > 0.5)
        return (x * self.masks[-1]).sin()


@pytest.mark.parametrize(("device", "again"), [("cuda:0", True), ("cpu", False)])
def test_a_block_called_with_keywords_only_draws_the_devices_masks_again(
    device: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own checkpoint, with a generator of the host as the device's. Told that the run is on the host, it saves
    nothing of the device for a block without positional arguments: the masks differ, the gradient is wrong, and nobody
    says so. Told that it is on the device, the gradient is that of a block that is kept."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: generator.set_state(state))
    model = nn.ModuleDict({"block": Masked(generator)})
    block: Any = model["block"]
    x = torch.linspace(-1.0, 1.0, 256).reshape(32, 8)

    def gradient() -> torch.Tensor:
        generator.manual_seed(3)
        block.masks.clear()
        model.zero_grad()
        block(x=x).sum().backward()
        found: torch.Tensor = block.inner.weight.grad.clone()
        return found

    kept = gradient()
    after = torch.rand(1, generator=generator)
    run = RunOfBlocks(closed=lambda: False, collects=lambda: False, stashes=lambda: pytest.fail("nothing is offloaded"))
    with MadeThere():
        undo = carry_out(model, [("block", "recompute")], torch.device(device), run)
    recomputed = gradient()
    undo()
    assert len(block.masks) == 2
    assert torch.equal(*block.masks) == torch.equal(recomputed, kept) == again
    if again:
        assert torch.equal(torch.rand(1, generator=generator), after)  # what is drawn next is not drawn twice


# Off the plan.


def other_batch(sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (2, sequence), generator=torch.Generator().manual_seed(sequence))
    return {"input_ids": ids, "labels": ids}


def both(run: Any, kit: Any, *batches: Any, between: Callable[[nn.Module], Any] | None = None) -> None:
    """One iteration of both models, with something in between forward and backward."""
    for model in (run.model, run.reference.model):
        losses = [kit.loss_of(model, batch) for batch in batches]
        if between is not None:
            between(model)
        torch.stack(losses).sum().backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.reference.step()


@pytest.mark.parametrize("how", [THREE, {0: "offload", 1: "offload"}])
def test_what_leaves_the_plan_is_right_and_comes_back(how: dict[int, str], start: Any, kit: Any) -> None:
    w = chosen(kit, "gpt2", how)
    plan = find_policy("tide")(w, kit.small_machine(w.peak_non_model_bytes + 250_000), Settings())
    run = start("gpt2", "tide", plan=plan, clip=1.0, replan_after=0)
    session = run.session
    both(run, kit, next(run.batches))
    assert session.deviations == 0
    both(run, kit, other_batch(14))  # longer: on demand
    both(run, kit, next(run.batches))
    both(run, kit, other_batch(8))  # shorter: on plan, its stashes smaller
    both(run, kit, next(run.batches), next(run.batches))  # two forwards before one backward
    assert session.deviations >= 3

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            kit.loss_of(model, other_batch(12))

    both(run, kit, next(run.batches), between=evaluate)  # leaves the plan while stashes are on the host
    evaluate(run.model)
    before = session.deviations
    both(run, kit, next(run.batches))
    assert session.deviations == before
    same(run, kit)


def test_an_exception_in_forward_leaves_nothing_behind(planned: Any, start: Any, kit: Any) -> None:
    run = start("gpt2", "tide", plan=planned("gpt2", THREE), clip=1.0, replan_after=0)
    both(run, kit, next(run.batches))
    block = run.model.transformer.h[2]
    live = LiveStorages([], run.model.buffers(), costs=False)
    for fails in (False, True):
        if fails:
            handle = block.mlp.c_fc.register_forward_pre_hook(_fail)
        with live:
            if fails:
                with pytest.raises(ZeroDivisionError):
                    kit.loss_of(run.model, next(run.batches))
                handle.remove()
                run.optimizer.zero_grad()
            else:
                kit.loss_of(run.model, next(run.batches))  # a forward that nobody wants
                run.optimizer.zero_grad()
        gc.collect()
        assert not [ref for refs in run.session.state.run.stashes._rooms.values() for ref in refs if ref() is not None]
    both(run, kit, next(run.batches))
    both(run, kit, next(run.batches))
    same(run, kit)


def _fail(module: nn.Module, args: Any) -> None:
    raise ZeroDivisionError


def test_a_graph_that_outlives_its_iteration_keeps_its_bytes(planned: Any, start: Any, kit: Any) -> None:
    """A forward whose backward never came in its iteration: its stash is on the host, and the next one's must not be
    written over it."""
    run = start("gpt2", "tide", plan=planned("gpt2", OFFLOAD), clip=1.0, replan_after=0)
    session = run.session
    both(run, kit, next(run.batches))
    kept = kit.loss_of(run.model, next(run.batches))  # its graph is alive from here on
    run.optimizer.zero_grad()
    held = [ref() for refs in session.state.run.stashes._rooms.values() for ref in refs]
    content = [saved.host.clone() for saved in held if saved is not None and saved.only_on_host]
    assert content
    both(run, kit, next(run.batches))  # a second forward before the backward: on demand
    both(run, kit, next(run.batches))
    assert any("still holds an earlier stash" in text for text in session.deviation_log)
    again = [saved.host for saved in held if saved is not None and saved.only_on_host]
    assert all(torch.equal(a, b) for a, b in zip(content, again))
    same(run, kit)
    del kept, held, again
    before = session.deviations
    both(run, kit, next(run.batches))
    assert session.deviations == before


def test_more_than_planned_stays_and_is_counted(kit: Any, start: Any) -> None:
    """A plan whose stash is half of what the block saves: the rest stays on the accelerator, the values are right."""
    from dataclasses import replace

    w = chosen(kit, "gpt2", OFFLOAD)
    w = replace(w, stashes=tuple(replace(s, bytes=s.bytes // 2) for s in w.stashes))
    run = start("gpt2", "tide", plan=kit.tight_plan("tide", w, Settings()), clip=1.0)
    both(run, kit, next(run.batches))
    both(run, kit, next(run.batches))
    same(run, kit)
    (report,) = run.session.state.run.stashes.reports
    assert 0 < report.moved_bytes <= report.planned_bytes < report.saved_bytes
    assert run.session.deviations == 2 and "bytes more than the plan offloads" in run.session.deviation_log[0]


def test_writing_into_what_was_saved_is_an_error_as_in_torch(planned: Any, start: Any, kit: Any) -> None:
    run = start("gpt2", "tide", plan=planned("gpt2", OFFLOAD), clip=1.0)
    seen: list[torch.Tensor] = []

    def write(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            seen.pop().add_(1.0)

    first, second = run.model.transformer.h[1].mlp.act, run.model.transformer.h[2].ln_1
    handles = [first.register_forward_hook(lambda m, a, out: seen.append(out)), second.register_forward_pre_hook(write)]
    loss = kit.loss_of(run.model, next(run.batches))
    for handle in handles:
        handle.remove()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    run.optimizer.zero_grad()
    both(run, kit, next(run.batches))


# What is refused.


def test_a_switch_is_turned_off_and_on_again(planned: Any, kit: Any) -> None:
    """The model's own checkpointing, by transformers' switch: block 0 goes on recomputing, the others stop, until the
    end."""
    plan = planned("llama", THREE)
    model, draw = kit.build("llama", checkpointing=True, layers=LAYERS)
    layers = model.model.layers
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, max_grad_norm=1.0), watchdog_s=5.0)
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, False]
    kit.train_alone(model, optimizer, kit.batches(draw), 1)
    assert optimizer.session.deviations == 0
    optimizer.session.close()
    assert all(layer.gradient_checkpointing for layer in layers)
    assert not any("_call_impl" in module.__dict__ for module in model.modules())


class _Own(nn.Module):
    """Six equal layers that may checkpoint themselves."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)) for _ in range(6))
        self.head = nn.Linear(24, 24)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            own = self.checkpointing and self.training
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if own else layer(x)
        return (self.head(x) ** 2).mean()


def _own(kit: Any, offload: list[int]) -> tuple[Workload, Iterator[Any]]:
    batch = {"x": torch.randn(4, 24, generator=torch.Generator().manual_seed(0))}
    kept = capture_module(_Own(False), batch, name="own", batch=4, sequence=1)
    blocks = block_names(kept)
    return offload_blocks(kept, [blocks[n] for n in offload]), iter([batch] * 9)


def test_a_model_that_checkpoints_a_block_itself_is_refused(kit: Any) -> None:
    w, batches = _own(kit, [1, 2])
    plan = kit.tight_plan("tide", w, Settings())
    for checkpointing in (False, True):
        model = _Own(checkpointing)
        model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, max_grad_norm=1.0), watchdog_s=5.0)
        try:
            if checkpointing:
                with pytest.raises(PlanError, match=r"keeps the activations of block 'layers\.0', and the model calls"):
                    kit.train_alone(model, optimizer, batches, 1)
            else:
                kit.train_alone(model, optimizer, batches, 1)
                assert optimizer.session.deviations == 0
                assert [r.moved_bytes for r in optimizer.session.state.run.stashes.reports] == [
                    s.bytes for s in w.stashes
                ]
        finally:
            optimizer.session.close(restore=False)


def test_a_plan_for_other_blocks_is_refused_before_anything_changes(kit: Any) -> None:
    w, _ = _own(kit, [1])
    plan = kit.tight_plan("tide", w, Settings())
    spec = executor.AdamW(lr=1e-2, max_grad_norm=1.0)
    model = _Own(False)
    model.layers[1]._compiled_call_impl = model.layers[1]._call_impl  # what .compile() sets
    with pytest.raises(PlanError, match=r"module 'layers\.1' is compiled, and the plan would offload"):
        executor.prepare(model, plan, spec)
    other = _Own(False)
    other.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(other.layers)})
    other.layers["1"], other.layers["2"] = other.layers["1"], other.layers["1"]
    with pytest.raises(PlanError, match="tied"):
        executor.prepare(other, plan, spec)
    assert not any("_call_impl" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("seed", [None, 0])
def test_on_streams_where_copies_happen_later(seed: int | None, planned: Any, start: Any, kit: Any) -> None:
    """Copies are issued and happen when a stream gets to them, up to 3 ms later; the values are those of plain torch,
    also where dropout's masks are wanted before the block's own first moment of backward."""
    rng = random.Random(seed)
    delays = None if seed is None else lambda queue: rng.uniform(0, 3e-3) * (rng.random() < 0.3)
    backend = VirtualStreams(delays=delays)
    plan = planned("gpt2", {0: "offload", 1: "offload"}, "optimal", micro_batches=2)
    run = start("gpt2", "optimal", plan=plan, clip=1.0, backend=backend)
    kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=2)
    same(run, kit)
    assert run.session.deviations == 0
    both(run, kit, next(run.batches), next(run.batches))
    both(run, kit, next(run.batches))  # one backward where the plan has two
    run.session.drain()
    same(run, kit)


def test_under_session_step(planned: Any, start: Any, kit: Any) -> None:
    """The engine runs the blocks one by one; what it calls is what the plan says of each."""
    run = start("gpt2", "tide", plan=planned("gpt2", THREE, micro_batches=2), clip=1.0)
    for _ in range(3):
        batches = [next(run.batches), next(run.batches)]
        result = run.session.step(batches)
        assert result.blocks == 3
        losses = [kit.loss_of(run.reference.model, batch) / 2 for batch in batches]
        for loss in losses:
            loss.backward()
        assert result.loss == pytest.approx(sum(float(loss.detach()) for loss in losses), rel=1e-6)
        run.reference.step()
    assert run.session.deviations == 0
    same(run, kit)
    assert [r.moved_bytes for r in run.session.state.run.stashes.reports] == [
        s.bytes for s in run.plan.workload.stashes
    ]


def test_a_new_plan_makes_the_same_choices(start: Any, kit: Any) -> None:
    """Batches of another length for good: after two iterations off plan there is one for them, with their stashes."""
    w = chosen(kit, "gpt2", THREE)
    plan = find_policy("tide")(w, kit.small_machine(w.peak_non_model_bytes + 250_000), Settings())
    run = start("gpt2", "tide", plan=plan, clip=1.0, replan_after=2)
    for _ in range(4):
        both(run, kit, other_batch(14))
    new = run.session.plan.workload
    assert new is not w and new.activations == w.activations
    assert new.stashes[0].bytes > w.stashes[0].bytes
    assert [r.moved_bytes for r in run.session.state.run.stashes.reports] == [s.bytes for s in new.stashes]
    before = run.session.deviations
    both(run, kit, other_batch(14))
    assert run.session.deviations == before
    same(run, kit)
