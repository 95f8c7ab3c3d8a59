"""The first iteration's tide is measured and held against the plan's, moment by moment."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.capture import capture_module
from executor.measuring import first
from executor.measuring.first import compare, tolerance_bytes
from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.registry import find_policy
from pstar_sim.workload.workload import Workload

WIDTH, ROWS = 48, 24


class Speech(nn.Module):
    """Convolutions and a recurrent layer of some kind."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.front = nn.Conv1d(8, WIDTH, 3, padding=1)
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True)
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.out(self.layers(self.front(x).transpose(1, 2))[0]) ** 2).mean()


class Keeping(torch.autograd.Function):
    """Keeps a buffer for its backward that it makes of real tensors only: a capture cannot know of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        real = type(x) in (torch.Tensor, nn.Parameter)
        ctx.kept = torch.zeros(16, *x.shape) if real else None
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1:
                x = Keeping.apply(x)
        return (x**2).mean()


def sounds(draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 8, 32, generator=draw)}


def vectors(draw: torch.Generator) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=draw)}


def shrunk(w: Workload, share: float) -> Workload:
    """A trace that saw only so much of the tide: what a fake version without its workspace makes of a model."""
    return replace(
        w,
        moments=tuple(
            replace(
                m,
                start_bytes=int(share * m.start_bytes),
                peak_bytes=int(share * m.peak_bytes),
                end_bytes=int(share * m.end_bytes),
            )
            for m in w.moments
        ),
    )


@pytest.fixture
def prepared() -> Iterator[Callable[..., Any]]:
    sessions: list[Any] = []

    def make(model: nn.Module, plan: Plan, **options: Any) -> tuple[nn.Module, Any]:
        model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2), watchdog_s=10.0, **options)
        sessions.append(optimizer.session)
        return model, optimizer

    yield make
    for session in sessions:
        session.close(restore=False)


def trained_beside(kit: Any, model: nn.Module, optimizer: Any, twin: nn.Module, draw: Any, steps: int = 3) -> None:
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    batches, others = kit.batches(draw), kit.batches(draw)
    for _ in range(steps):
        assert kit.train_alone(model, optimizer, batches, 1) == kit.train_alone(twin, plain, others, 1)
    values = model.state_dict()
    assert all(torch.equal(values[name], value) for name, value in twin.state_dict().items())


def in_budget(plan: Plan, session: Any) -> None:
    tide = session.status().tide
    assert tide.gpu_budget_bytes == plan.gpu_budget_bytes
    assert tide.above == 0 and tide.gpu_peak_bytes <= plan.gpu_budget_bytes


@pytest.mark.parametrize(("make", "draw"), [
    (lambda: Speech(nn.LSTM), sounds), (lambda: Speech(nn.GRU), sounds), (lambda: Speech(nn.RNN), sounds),
])  # fmt: skip
def test_recurrent_models_are_captured_as_they_run(
    kit: Any, prepared: Callable[..., Any], caplog: Any, make: Any, draw: Any
) -> None:
    """The LSTM's workspace, of which its fake version knows nothing, is in the trace."""
    torch.manual_seed(0)
    model = make()
    w = capture_module(model, draw(torch.Generator().manual_seed(9)), name="speech")
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    twin = copy.deepcopy(model)
    model, optimizer = prepared(model, plan)
    with caplog.at_level(logging.WARNING, "executor"):
        trained_beside(kit, model, optimizer, twin, draw)
    in_budget(plan, optimizer.session)
    assert optimizer.session.plan is plan and not caplog.records


@pytest.mark.parametrize("streams", [False, True])
def test_a_buffer_that_no_capture_sees_is_planned_for_after_the_first_iteration(
    kit: Any, prepared: Callable[..., Any], caplog: Any, streams: bool
) -> None:
    torch.manual_seed(0)
    model = Hiding()
    hidden = 16 * ROWS * WIDTH * 4
    w = capture_module(model, vectors(torch.Generator().manual_seed(9)), name="hiding")
    machine = kit.small_machine(w.peak_non_model_bytes + hidden + 100_000)
    plan = find_policy("tide")(w, machine, Settings(update="step", clip=False))
    twin = copy.deepcopy(model)
    backend = {"backend": executor.VirtualStreams()} if streams else {}
    model, optimizer = prepared(model, plan, **backend)
    session = optimizer.session
    with caplog.at_level(logging.WARNING, "executor"):
        kit.train_alone(model, optimizer, kit.batches(vectors), 1)
        said = session.status().tide
        twin_step(kit, twin)
    # It is made behind the second layer; from there on every moment holds it.
    assert (said.name, said.module, said.above > 1) == ("end:layers.1", "layers.1", True)
    assert hidden <= said.measured_bytes - said.planned_bytes <= said.most_bytes <= hidden + 8
    (record,) = caplog.records
    assert "planned again by tide" in record.message and f"module {said.module!r}" in record.message
    assert session.plan is not plan and session.plan.gpu_budget_bytes == plan.gpu_budget_bytes
    trained_on(kit, model, optimizer, twin)
    in_budget(plan, session)  # the second iteration's, under the new plan
    assert session.deviations == 0


def twin_step(kit: Any, twin: nn.Module) -> None:
    twin.plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    kit.train_alone(twin, twin.plain, kit.batches(vectors), 1)


def trained_on(kit: Any, model: nn.Module, optimizer: Any, twin: Any) -> None:
    mine, theirs = kit.batches(vectors, 2), kit.batches(vectors, 2)
    for _ in range(2):
        assert kit.train_alone(model, optimizer, mine, 1) == kit.train_alone(twin, twin.plain, theirs, 1)
    values = model.state_dict()
    assert all(torch.equal(values[name], value) for name, value in twin.state_dict().items())


def test_a_tide_that_fits_no_plan_is_refused_with_everything_whole(kit: Any, prepared: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model = Hiding()
    w = capture_module(model, vectors(torch.Generator().manual_seed(9)), name="hiding")
    machine = kit.small_machine(w.peak_non_model_bytes + 30_000)
    plan = find_policy("tide")(w, machine, Settings(update="step", clip=False))
    twin = copy.deepcopy(model)
    model, optimizer = prepared(model, plan)
    with pytest.raises(DoesNotFit, match="all parameters are those after step 0") as caught:
        kit.train_alone(model, optimizer, kit.batches(vectors), 1)
    assert "\n" not in str(caught.value) and "has" in str(caught.value) and "the plan" in str(caught.value)
    twin_step(kit, twin)
    values = model.state_dict()
    assert all(torch.equal(values[name], value) for name, value in twin.state_dict().items())
    optimizer.zero_grad()
    with pytest.raises(DoesNotFit):  # and it does not go on over its budget
        kit.loss_of(model, next(kit.batches(vectors)))
    with torch.no_grad():
        kit.loss_of(model, next(kit.batches(vectors)))  # an evaluation is another matter


def test_a_trace_that_saw_too_much_is_said_and_stays(kit: Any, prepared: Callable[..., Any], caplog: Any) -> None:
    model, draw = kit.build("mlp")
    w = shrunk(kit.workload_of(model, draw(torch.Generator().manual_seed(9))), 8.0)
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    model, optimizer = prepared(model, plan)
    with caplog.at_level(logging.WARNING, "executor"):
        kit.train_alone(model, optimizer, kit.batches(draw), 1)
    tide = optimizer.session.status().tide
    assert tide.above == 0 and tide.below > 0 and "below the plan, none above" in str(tide)
    assert optimizer.session.plan is plan and not caplog.records


def test_every_policy_plans_again_and_trains_as_plain_torch(kit: Any, prepared: Callable[..., Any]) -> None:
    """A trace of a third of the tide, with accumulation in eager and classical updates."""
    for policy, update in itertools.product(("tide", "optimal", "patrickstar", "zero_offload"), ("step", "eager")):
        model, draw = kit.build("mlp")
        w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
        machine = kit.small_machine(w.peak_non_model_bytes + sum(t.bytes for t in w.tensors) * 2)
        plan = find_policy(policy)(shrunk(w, 0.3), machine, Settings(update=update, clip=False))
        twin = copy.deepcopy(model)
        spec = executor.AdamW(lr=1e-2, eager=update == "eager")
        model, optimizer = executor.prepare(model, plan, spec, watchdog_s=10.0)
        trained_beside(kit, model, optimizer, twin, draw)
        assert optimizer.session.plan is not plan
        assert optimizer.session.plan.workload.peak_non_model_bytes >= w.peak_non_model_bytes - tolerance_bytes(w)
        optimizer.session.close(restore=False)


def test_the_first_iterations_that_are_not_the_plans_are_not_compared(kit: Any, prepared: Callable[..., Any]) -> None:
    """A smaller batch, an evaluation, an iteration off plan: the comparison waits for one that can be compared."""
    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)), micro_batches=2)
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    model, optimizer = prepared(model, plan)
    batches = kit.batches(draw)
    small = ({key: value[:1] for key, value in next(batches).items()} for _ in range(2))
    kit.train_alone(model, optimizer, small, 2)
    with torch.no_grad():
        kit.loss_of(model, next(batches))
    kit.train_alone(model, optimizer, batches, 1)  # a micro-batch short
    assert optimizer.session.status().tide is None
    kit.train_alone(model, optimizer, batches, 2)
    assert optimizer.session.status().tide.iteration == 2


def test_the_tolerance_is_a_share_of_the_highest_tide(kit: Any) -> None:
    model, draw = kit.build("gpt2")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    planned = [m.peak_bytes for m in w.moments]
    allowed = tolerance_bytes(w)
    assert allowed == max(4096, int(0.02 * w.peak_non_model_bytes))
    figures = {"iteration": 0, "gpu_peak_bytes": 1, "gpu_budget_bytes": 2}
    assert compare(w, [size + allowed for size in planned], **figures).above == 0
    one = [size + (allowed + 1) * (i == 5) for i, size in enumerate(planned)]
    found = compare(w, one, **figures)
    assert (found.above, found.moment, found.name) == (1, 5, w.moments[5].name)
    assert found.most_bytes == allowed + 1 and f"{allowed + 1:+,} bytes" in str(found)


def test_it_counts_in_one_iteration_and_then_no_more(kit: Any, prepared: Callable[..., Any]) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    before = len(_get_current_dispatch_mode_stack())
    plan = kit.tight_plan("tide", w, Settings(update="step", clip=False))
    model, optimizer = prepared(model, plan)
    assert len(_get_current_dispatch_mode_stack()) == before + 1
    kit.train_alone(model, optimizer, kit.batches(draw), 1)
    assert len(_get_current_dispatch_mode_stack()) == before
    assert optimizer.session.state.listeners == [] and optimizer.session.arena.log.marks is None
    tide = optimizer.session.status().tide
    real = optimizer.session.measure_iteration(
        lambda: kit.train_alone(model, optimizer, kit.batches(draw), 1)
    ).non_model_bytes
    assert tide.measured_bytes <= max(real) + tolerance_bytes(w)


def test_a_loop_in_another_thread_is_told_that_nothing_was_compared(
    kit: Any, prepared: Callable[..., Any], caplog: Any
) -> None:
    import threading

    model, draw = kit.build("mlp")
    w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    model, optimizer = prepared(model, kit.tight_plan("tide", w, Settings(update="step", clip=False)))
    with caplog.at_level(logging.WARNING, "executor"):
        thread = threading.Thread(target=lambda: kit.train_alone(model, optimizer, kit.batches(draw), 1))
        thread.start()
        thread.join()
    assert "in another thread than executor.prepare" in caplog.text
    assert optimizer.session.status().tide is None


def test_a_tide_that_grows_with_every_iteration_stops_the_planning(
    kit: Any, prepared: Callable[..., Any], caplog: Any
) -> None:
    """A loop that keeps what it computed."""
    torch.manual_seed(0)
    model = Hiding()
    w = capture_module(model, vectors(torch.Generator().manual_seed(9)), name="hiding")
    machine = kit.small_machine(10**8)
    model, optimizer = prepared(model, find_policy("tide")(w, machine, Settings(update="step", clip=False)))
    kept: list[torch.Tensor] = []
    hook = model.layers[0].register_forward_hook(lambda *_: kept.append(torch.zeros(len(kept) + 1, 100_000)))
    with caplog.at_level(logging.WARNING, "executor"):
        for _ in range(first.MOST_PLANS + 2):
            kit.train_alone(model, optimizer, kit.batches(vectors), 1)
    hook.remove()
    assert sum("planned again" in r.message for r in caplog.records) == first.MOST_PLANS
    assert "no further plan after 3" in caplog.records[-1].message


# -- several models ---------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Its activations are 16 times those of `Student`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(16, 1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x**2).mean()


class Student(nn.Module):
    """Calls what `beside` holds between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.beside: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.one(x))
        for call in self.beside:
            call(x.detach())
        return (self.two(x) ** 2).mean()


def evaluated(other: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.no_grad()(other)


def trained_on_it(other: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        loss = other(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return call


def planned_tightly(kit: Any, model: nn.Module) -> Plan:
    w = capture_module(model, vectors(torch.Generator().manual_seed(9)), name=type(model).__name__)
    return kit.tight_plan("tide", w, Settings(update="step", clip=False))


@pytest.mark.parametrize("limit", [False, True], ids=["", "limited"])
@pytest.mark.parametrize("where", ["in its forward", "after its forward"])
@pytest.mark.parametrize("use", [evaluated, trained_on_it])
def test_the_bytes_of_another_prepared_model_are_not_the_models(
    kit: Any, prepared: Callable[..., Any], caplog: Any, use: Any, where: str, limit: bool
) -> None:
    """Both in their first iteration, each under a plan with room for itself alone: one layer of the other has 73,728
    bytes, and the student's highest tide is below that."""
    torch.manual_seed(0)
    student, other = Student(), Wide()
    plans = [planned_tightly(kit, student), planned_tightly(kit, other)]
    layer = 16 * ROWS * WIDTH * 4
    assert plans[0].workload.peak_non_model_bytes < layer < plans[1].workload.peak_non_model_bytes
    twins = copy.deepcopy(student), copy.deepcopy(other)
    backends = [{"backend": executor.VirtualBackend(gpu_bytes=p.gpu_budget_bytes)} if limit else {} for p in plans]
    student, optimizer = prepared(student, plans[0], **backends[0])
    other, others = prepared(other, plans[1], **backends[1])
    plain, plains = (torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True) for twin in twins)
    with caplog.at_level(logging.WARNING, "executor"):
        for models, ends in (((student, other), (optimizer, others)), (twins, (plain, plains))):
            call = use(models[1], ends[1])
            for x in itertools.islice(kit.batches(vectors), 3):
                models[0].beside[:] = [call] if where == "in its forward" else []
                loss = models[0](**x)
                if where == "after its forward":
                    call(x["x"])
                loss.backward()
                ends[0].step()
                ends[0].zero_grad()
    assert not caplog.records
    assert optimizer.session.plan is plans[0] and others.session.plan is plans[1]
    in_budget(plans[0], optimizer.session)
    if use is trained_on_it:
        in_budget(plans[1], others.session)
    for model, twin in zip((student, other), twins):
        values = model.state_dict()
        assert all(torch.equal(values[name], value) for name, value in twin.state_dict().items())


@pytest.mark.parametrize("small", [0, 1])
def test_the_model_that_is_too_small_is_named(kit: Any, prepared: Callable[..., Any], small: int) -> None:
    """The student trains `Hiding` in its forward. The trace of one of the two lacks a buffer that it keeps."""
    torch.manual_seed(0)
    student, other = Student(), Hiding()
    student.beside[:] = [Keeping.apply] if small == 0 else []
    hidden = 16 * ROWS * WIDTH * 4
    plans = []
    for number, model in enumerate((student, other)):
        w = capture_module(model, vectors(torch.Generator().manual_seed(9)), name=type(model).__name__)
        room = 30_000 if number == small else hidden + 100_000
        machine = kit.small_machine(w.peak_non_model_bytes + room)
        plans.append(find_policy("tide")(w, machine, Settings(update="step", clip=False)))
    student, optimizer = prepared(student, plans[0])
    other, others = prepared(other, plans[1])
    student.beside.append(trained_on_it(other, others))
    with pytest.raises(DoesNotFit) as caught:
        for x in itertools.islice(kit.batches(vectors), 2):
            student(**x).backward()
            optimizer.step()
            optimizer.zero_grad()
    said = "of Student: module 'one' in moment" if small == 0 else "of Hiding: module 'layers.1' in moment"
    assert said in str(caught.value)
