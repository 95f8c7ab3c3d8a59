"""Training on a CUDA device: the numbers of plain torch on the same device, under every kind of plan. Needs a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import executor
from executor.activations.planned import RunOfBlocks, carry_out
from executor.queues.streams import StreamQueues
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Place, Queue
from pstar_sim.errors import ContractError, PstarError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch finds none"),
]

# fp32: bounds.py. bf16: a value near the middle of two is rounded either way, one unit of eight bits: 2**-8 = 3.9e-3.
BF16 = 5e-3


def there(batch: Any) -> Any:
    return {name: value.cuda() for name, value in batch.items()}


@pytest.fixture
def on_cuda(kit: Any, start: Callable[..., Any], bounds: Any) -> Callable[..., Any]:
    """`start` with the run, its twin and its batches on the device. The twin updates each parameter where the plan
    does."""

    def begin(name: str, policy: str, **options: Any) -> Any:
        run = start(name, policy, device="cuda", **options)
        run.reference = bounds.placed(kit, run.plan, run.reference.model.cuda(), 1e-2, 0.1, options.get("clip"))
        run.bounds = bounds
        batches = run.batches
        run.batches = (there(batch) for batch in batches)
        return run

    return begin


def same(kit: Any, run: Any, *, steps: int = 3, micro_batches: int = 1) -> None:
    """Losses and parameters are the twin's, within [Note: the bound] of bounds.py."""
    if run.reference.bf16:
        mine, theirs = kit.train_both(
            run.model, run.reference, run.optimizer, run.batches, steps=steps, micro_batches=micro_batches
        )
        values = run.model.state_dict()
        for name, parameter in run.reference.model.named_parameters():
            assert kit.distance(values[name], parameter.detach()) <= BF16, name
    else:
        mine, theirs = run.bounds.train(kit, run, steps=steps, micro_batches=micro_batches)
    assert mine == pytest.approx(theirs, rel=BF16 if run.reference.bf16 else run.bounds.LOSS, abs=0)
    assert run.session.deviations == 0


@pytest.mark.parametrize("policy", ["tide", "zero_offload", "patrickstar", "static_partition", "optimal"])
@pytest.mark.parametrize(
    ("model", "micro_batches", "clip", "dtype"),
    [
        ("mlp", 1, None, torch.float32),
        ("mlp", 3, 0.5, torch.float32),
        ("gpt2", 1, 0.5, torch.float32),
        ("llama", 2, 0.5, torch.float32),
        ("mlp", 1, 0.5, torch.bfloat16),
    ],
)
def test_parity(
    kit: Any,
    on_cuda: Callable[..., Any],
    policy: str,
    model: str,
    micro_batches: int,
    clip: float | None,
    dtype: torch.dtype,
) -> None:
    run = on_cuda(model, policy, micro_batches=micro_batches, clip=clip, dtype=dtype)
    assert isinstance(run.session.queues, StreamQueues)
    same(kit, run, micro_batches=micro_batches)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_eager_updates(kit: Any, on_cuda: Callable[..., Any], checkpointing: bool) -> None:
    run = on_cuda("mlp", "tide", update="eager", checkpointing=checkpointing)
    same(kit, run)


@pytest.mark.parametrize("policy", ["tide", "zero_offload", "patrickstar"])
def test_streams_equal_the_serial_order_to_the_bit(kit: Any, on_cuda: Callable[..., Any], policy: str) -> None:
    """The same plan, each step as its edges allow, one at a time in the training thread: no stream, no event."""
    found: list[Any] = []
    plan = None
    for queues in ("threads", executor.SerialQueues(lambda possible, compute, may: 0)):
        run = on_cuda("mlp", policy, clip=0.5, micro_batches=2, queues=queues, plan=plan)
        plan = run.plan
        losses = [kit.train_alone(run.model, run.optimizer, run.batches, 2) for _ in range(4)]
        found.append((losses, run.model.state_dict()))
        run.session.close(restore=False)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


@pytest.mark.usefixtures("streaming")
def test_states_that_visit(kit: Any, on_cuda: Callable[..., Any]) -> None:
    run = on_cuda("gpt2", "optimal", micro_batches=2, clip=0.5)
    assert run.plan.modes.count("stream") > 2
    same(kit, run, micro_batches=2)


@pytest.mark.parametrize(
    ("model", "policy", "micro_batches", "dtype", "host_share", "chunk_bytes"),
    [
        ("gpt2", "tide", 1, torch.float32, 0.2, 16384),
        ("llama", "optimal:order=depth-first", 2, torch.bfloat16, 0.25, 4096),
        ("llama", "params=nvme,states=nvme", 2, torch.float32, None, None),
    ],
)
def test_lists_on_disks(
    kit: Any,
    on_cuda: Callable[..., Any],
    tmp_path: Path,
    model: str,
    policy: str,
    micro_batches: int,
    dtype: torch.dtype,
    host_share: float | None,
    chunk_bytes: int | None,
) -> None:
    """Rooms of the host that copies to the device have read take what comes from the disks next."""
    about: dict[str, Any] = {"micro_batches": micro_batches, "dtype": dtype, "layers": 3}
    plan = kit.plan_on_disks(
        model, policy, clip=True, host_share=host_share, beside=True, chunk_bytes=chunk_bytes, **about
    )
    assert any((row.place, row.list) == (Place.NVME, "param") for row in plan.initial)
    run = on_cuda(model, policy, plan=plan, disks=[tmp_path], clip=0.5, checkpointing=True, **about)
    same(kit, run, micro_batches=micro_batches)
    moved = run.session.timeline().moved_bytes
    assert moved == {lane: plan.moved_bytes[lane] for lane in moved} and moved["nvme_read"]


def test_adam_that_comes_last(kit: Any, on_cuda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is not recorded yet waits for nothing: the issuing thread has to wait, and its time is a stall. The
    first update is held until all else stands still."""
    run = on_cuda("mlp", "tide", clip=0.5)
    session, plain, held = run.session, run.session.contents.adam, list[bool]()

    def last(chunk: int, place: Place, *rest: Any) -> None:
        if not held and place is Place.HOST:
            held.append(kit.stands_still(session.queues, but=Queue.ADAM))
        plain(chunk, place, *rest)

    monkeypatch.setattr(session.contents, "adam", last)
    # No parameter is read between the steps, as `same` does: reading waits for Adam as well.
    mine, theirs = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=3, micro_batches=1)
    assert mine == pytest.approx(theirs, rel=5e-5)
    assert held == [True]
    assert session.queues.host_wait_s > 0


class TestHazards:
    """Each copy queue is held up on the device; what is not ordered by an event then shows."""

    @staticmethod
    def hold_up(backend: Any, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = backend.copy

        def copy(target: Any, source: Any, direction: Queue) -> None:
            if direction is queue and backend.queue is queue:
                torch.cuda._sleep(5_000_000)  # cycles: a few milliseconds
            plain(target, source, direction)

        monkeypatch.setattr(backend, "copy", copy)

    @pytest.mark.parametrize("queue", [Queue.H2D, Queue.D2H])
    def test_slow_copies_change_nothing(
        self, kit: Any, on_cuda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, queue: Queue
    ) -> None:
        run = on_cuda("mlp", "tide", clip=0.5)
        self.hold_up(run.session.backend, queue, monkeypatch)
        monkeypatch.setattr(run.session.contents, "_copy", run.session.backend.copy)
        same(kit, run)

    def test_sums_wait_for_slow_copies(
        self, kit: Any, on_cuda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The host adds each micro-batch's gradients; no norm waits for them first."""
        run = on_cuda("mlp", "tide", micro_batches=3)
        self.hold_up(run.session.backend, Queue.D2H, monkeypatch)
        monkeypatch.setattr(run.session.contents, "_copy", run.session.backend.copy)
        same(kit, run, micro_batches=3)

    def test_without_the_gate_a_block_is_used_while_it_is_read(
        self, kit: Any, on_cuda: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is given back is written to at once, as its next owner would, on a stream that waits for nothing."""
        run = on_cuda("mlp", "tide", clip=0.5)
        backend = run.session.backend
        self.hold_up(backend, Queue.D2H, monkeypatch)
        monkeypatch.setattr(run.session.contents, "_copy", backend.copy)
        plain, other = backend.gate.give, torch.cuda.Stream()

        def give(payload: torch.Tensor, queue: Queue) -> None:
            if queue is Queue.D2H and payload.untyped_storage().nbytes():
                with torch.cuda.stream(other):
                    payload.fill_(float("nan"))
            plain(payload, queue)

        monkeypatch.setattr(backend.gate, "give", give)
        with pytest.raises((PstarError, AssertionError)):
            same(kit, run)


class TestPlaces:
    def test_a_model_on_the_device_comes_back_to_it(self, kit: Any) -> None:
        model, draw = kit.build("mlp")
        w = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
        plan = kit.tight_plan("tide", w, Settings(clip=False))
        model, optimizer = executor.prepare(model.cuda(), plan, executor.AdamW(lr=1e-2), device="cuda:0")
        assert all(p.device.type == "cuda" for p in model.parameters())
        kit.train_alone(model, optimizer, (there(b) for b in kit.batches(draw)), 1)
        assert {v.device.type for v in model.state_dict().values()} == {"cpu"}
        optimizer.session.close()
        assert {p.device.type for p in model.parameters()} == {"cuda"}
        assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}

    def test_a_model_on_the_host_comes_back_to_the_host(self, kit: Any, on_cuda: Callable[..., Any]) -> None:
        run = on_cuda("mlp", "tide", clip=0.5)
        same(kit, run, steps=1)
        run.session.close()
        assert {p.device.type for p in run.model.parameters()} == {"cpu"}

    def test_a_model_on_a_wrong_device(self, kit: Any) -> None:
        model, draw = kit.build("mlp")
        plan = kit.tight_plan("tide", kit.workload_of(model, draw(torch.Generator())), Settings(clip=False))
        model.layers[0].cuda()
        with pytest.raises(ContractError, match="on a wrong device"):
            executor.prepare(model, plan, executor.AdamW(), device="cuda")

    def test_buffers_are_on_the_device(self, kit: Any, on_cuda: Callable[..., Any]) -> None:
        run = on_cuda("llama", "tide", clip=0.5)
        assert {b.device.type for b in run.model.buffers()} == {"cuda"}
        run.session.close(restore=False)
        assert {b.device.type for b in run.model.buffers()} == {"cpu"}


def test_dropout_in_a_recomputed_block_called_with_keywords_only() -> None:
    """The gradient is that of a block that is kept, to the bit: the same masks from the device's own generator."""

    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.dropout(self.inner(x), 0.5).sin()

    model = torch.nn.ModuleDict({"block": Dropped()}).cuda()
    x = torch.randn(32, 64, device="cuda")

    def gradient() -> torch.Tensor:
        torch.cuda.manual_seed(3)
        model.zero_grad()
        model["block"](x=x).sum().backward()
        found: torch.Tensor = model["block"].inner.weight.grad.clone()
        return found

    kept = gradient()
    run = RunOfBlocks(closed=lambda: False, collects=lambda: False, stashes=lambda: pytest.fail("nothing is offloaded"))
    undo = carry_out(model, [("block", "recompute")], x.device, run)
    recomputed = gradient()
    undo()
    assert torch.equal(kept, recomputed)


def test_recorded_on_the_device(kit: Any, start: Callable[..., Any]) -> None:
    """A warm-up on CUDA has the moments of a capture, with seconds."""
    model, draw = kit.build("gpt2")
    captured = kit.workload_of(model, draw(torch.Generator().manual_seed(9)))
    machine = kit.small_machine(captured.peak_non_model_bytes * 2 + 10**7)
    batch = draw(torch.Generator().manual_seed(1))
    w = executor.record(model, [batch], machine, name="gpt2", device="cuda", loss=kit.loss_of, timed=2)
    assert [m.name for m in w.moments] == [m.name for m in captured.moments]
    # A device runs other kernels, which touch the parameters of a moment in another order.
    by_moment = attrgetter("moment", "tensor", "kind.value")
    assert sorted(w.uses, key=by_moment) == sorted(captured.uses, key=by_moment)
    assert all(m.duration_s is not None and m.duration_s > 0 for m in w.moments[:-1])


def test_an_evaluation_and_another_shape_between_steps(kit: Any, on_cuda: Callable[..., Any]) -> None:
    run = on_cuda("gpt2", "tide", clip=0.5)
    same(kit, run, steps=1)
    batch = next(run.batches)
    with torch.no_grad():
        mine, theirs = kit.loss_of(run.model, batch), kit.loss_of(run.reference.model, batch)
    assert float(mine) == pytest.approx(float(theirs), rel=2e-5)
    short = {name: value[:, :8].contiguous() for name, value in batch.items()}
    for model, step in ((run.model, run.optimizer.step), (run.reference.model, run.reference.step)):
        kit.loss_of(model, short).backward()
        step()
    run.optimizer.zero_grad()
    mine2, theirs2 = kit.train_both(run.model, run.reference, run.optimizer, run.batches, steps=2, micro_batches=1)
    assert mine2 == pytest.approx(theirs2, rel=5e-5)


# -- the loop contract, line by line, on the device -------------------------------------------------------------------

_SPEC = importlib.util.spec_from_file_location(
    "loop_contract_on_cuda", Path(__file__).parents[1] / "executor" / "session" / "test_loop_contract.py"
)
assert _SPEC is not None and _SPEC.loader is not None
_CONTRACT: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["loop_contract_on_cuda"] = _CONTRACT
_SPEC.loader.exec_module(_CONTRACT)


@pytest.fixture(params=["tide", "zero_offload"])
def run(request: Any, on_cuda: Callable[..., Any]) -> Any:
    return on_cuda("mlp", request.param, clip=0.5)


@pytest.fixture
def eager(on_cuda: Callable[..., Any]) -> Any:
    return on_cuda("mlp", "tide", update="eager")


class TestContractOfGradients(_CONTRACT.TestGradients):  # type: ignore[misc]
    test_grad_scaler = None  # is of the CPU's GradScaler


class TestContractOfZeroGrad(_CONTRACT.TestZeroGrad):  # type: ignore[misc]
    pass


class TestContractOfSteps(_CONTRACT.TestStepsAndBackwards):  # type: ignore[misc]
    test_fewer_than_planned = None  # starts a run of its own, on the virtual accelerator


class TestContractOfTheModel(_CONTRACT.TestModel):  # type: ignore[misc]
    test_closing_gives_a_plain_model_back = None  # goes on with batches where the model is: see TestPlaces


class TestContractOfTheOptimizer(_CONTRACT.TestOptimizer):  # type: ignore[misc]
    test_resuming = None  # starts runs of its own


def test_fewer_micro_batches_than_planned(kit: Any, on_cuda: Callable[..., Any]) -> None:
    run = on_cuda("mlp", "tide", micro_batches=3, clip=0.5)
    for micro_batches, deviations in ((3, 0), (2, 1), (3, 1)):
        mine, theirs = run.bounds.train(kit, run, steps=1, micro_batches=micro_batches)
        assert mine == pytest.approx(theirs, rel=run.bounds.LOSS, abs=0)
        assert run.session.deviations == deviations


def test_resuming(kit: Any, on_cuda: Callable[..., Any]) -> None:
    """Trained 2 + 3 steps with a new session in between equals 5 steps in one, to the bit."""
    whole = on_cuda("mlp", "tide", clip=0.5)
    batches = [next(whole.batches) for _ in range(5)]
    losses = [kit.train_alone(whole.model, whole.optimizer, iter([b]), 1) for b in batches]
    part = on_cuda("mlp", "tide", clip=0.5)
    again = [kit.train_alone(part.model, part.optimizer, iter([b]), 1) for b in batches[:2]]
    saved, state = part.model.state_dict(), part.optimizer.state_dict()
    part.session.close()
    model, _ = kit.build("mlp", seed=5)
    model.load_state_dict(saved)
    spec = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    model, optimizer = executor.prepare(model, part.plan, spec, device="cuda")
    optimizer.load_state_dict(state)
    again += [kit.train_alone(model, optimizer, iter([b]), 1) for b in batches[2:]]
    ended = model.state_dict()
    optimizer.session.close(restore=False)
    assert again == losses
    assert all(torch.equal(ended[name], value) for name, value in whole.model.state_dict().items())
