"""session.step(micro_batches, order="relay"): layer-major, equal to the bit to accumulation in plain torch."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.models import enable_checkpointing
from pstar_sim.core.plan import Settings
from pstar_sim.errors import ContractError, DoesNotFit
from pstar_sim.workload.workload import repeat_micro_batch


def plain(run: Any, kit: Any, rows: Sequence[Any], seeds: Sequence[int] | None = None) -> None:
    """One iteration of the usual loop on the twin. seeds: of each micro-batch."""
    for n, row in enumerate(rows):
        if seeds is not None:
            torch.manual_seed(seeds[n])
        (kit.loss_of(run.reference.model, row) / len(rows)).backward()
        run.reference.after_backward()
    run.reference.step()


def assert_equal_bits(run: Any) -> None:
    named = dict(run.model.named_parameters())
    for name, p in run.reference.model.named_parameters():
        assert torch.equal(named[name].detach().clone(), p.detach()), name
    states = run.optimizer.state_dict()["state"]
    for number, p in enumerate(run.reference.model.parameters()):
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[number][key], run.reference.optimizer.state[p][key])


@pytest.mark.parametrize(
    ("name", "policy", "checkpointing", "update", "clip"),
    [
        ("mlp", "l2l", False, "step", 0.5),
        ("gpt2", "l2l", True, "eager", None),
        ("llama", "tide:order=relay", True, "step", 0.5),
        ("bert", "l2l", True, "eager", None),
    ],
)
def test_the_sums_are_those_of_accumulation(
    start: Callable[..., Any], kit: Any, name: str, policy: str, checkpointing: bool, update: str, clip: float | None
) -> None:
    run = start(name, policy, checkpointing=checkpointing, micro_batches=3, update=update, clip=clip, layers=3)
    session = run.session
    assert not session.plan.workload.order.of_loop
    for _ in range(2):
        rows = [next(run.batches) for _ in range(3)]
        result = session.step(rows)  # in the order of the plan
        plain(run, kit, rows)
    assert result.blocks == (6 if name == "mlp" else 3)
    assert_equal_bits(run)
    assert session.deviations == 0, list(session.deviation_log)
    assert session.first.report.above == 0  # no moment holds more than its plan


def test_the_bytes_over_the_link_do_not_depend_on_the_micro_batches(start: Callable[..., Any]) -> None:
    moved = []
    for count in (2, 4):
        run = start("mlp", "l2l", checkpointing=True, micro_batches=count)
        rows = [next(run.batches) for _ in range(count)]
        measured = run.session.measure_iteration(partial(run.session.step, rows, order="relay"))
        moved.append(measured.moved_bytes)
    assert moved[0] == moved[1] and moved[0]["h2d"] > 0 < moved[0]["d2h"]


@pytest.fixture
def dropping(start: Callable[..., Any], kit: Any) -> Any:
    """GPT-2 with dropout, tied and recomputed, under a layer-major plan of three micro-batches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=kit.VOCABULARY, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config)
    model.config.use_cache = False
    enable_checkpointing("gpt2", model)
    model.train()
    twin, batches = copy.deepcopy(model), kit.batches(kit._text)
    w = repeat_micro_batch(kit.workload_of(model, next(batches), name="dropping"), 3)
    plan = kit.tight_plan("tide:order=relay", w, Settings(clip=False))
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, weight_decay=0.1), watchdog_s=5.0)
    yield kit.Run(model, optimizer, kit.Reference(twin, 1e-2, 0.1, None), plan, batches)
    optimizer.session.close(restore=False)


def driven(run: Any, kit: Any, rows: Sequence[Any]) -> None:
    """One iteration on both, with the random numbers that the documents promise."""
    torch.manual_seed(7)
    run.session.step(rows, order="relay")
    after = torch.get_rng_state()
    torch.manual_seed(7)
    seeds = torch.randint(2**62, (len(rows),)).tolist()
    assert torch.equal(after, torch.get_rng_state())
    plain(run, kit, rows, seeds)


def test_dropout_and_micro_batches_that_are_fewer_or_smaller(dropping: Any, kit: Any) -> None:
    full, half = next(dropping.batches), {key: rows[:1] for key, rows in next(dropping.batches).items()}
    for rows in ([full, full, full], [full, full, half], [full, full], [full], [full, full, full]):
        driven(dropping, kit, rows)
    assert_equal_bits(dropping)
    assert dropping.session.deviations == 3  # one smaller on plan, two iterations of fewer off it


def test_an_error_in_a_forward_leaves_no_thread(dropping: Any, kit: Any) -> None:
    rows = [next(dropping.batches) for _ in range(3)]
    driven(dropping, kit, rows)
    threads, calls = set(threading.enumerate()), []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(module)
        if len(calls) == 2:
            raise ValueError("in the second micro-batch")

    handle = dropping.model.transformer.h[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the second micro-batch"):
        dropping.session.step(rows, order="relay")
    handle.remove()
    assert set(threading.enumerate()) <= threads
    driven(dropping, kit, rows)
    assert_equal_bits(dropping)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_in_a_forward_leaves_no_thread(dropping: Any, kit: Any) -> None:
    rows = [next(dropping.batches) for _ in range(3)]
    threads = set(threading.enumerate())
    handle = dropping.model.transformer.h[1].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        dropping.session.step(rows, order="relay")
    handle.remove()
    assert set(threading.enumerate()) <= threads
    dropping.optimizer.zero_grad()
    driven(dropping, kit, rows)
    assert_equal_bits(dropping)


def test_another_order_than_the_plans_is_refused(start: Callable[..., Any], dropping: Any, kit: Any) -> None:
    rows = [next(dropping.batches) for _ in range(2)]
    with pytest.raises(ContractError, match="order='depth-first', and the plan of tide:order=relay is for order='rel"):
        dropping.session.step(rows, order="depth-first")
    with pytest.raises(ContractError, match="the plan of tide:order=relay is layer-major: its iterations run in sess"):
        kit.loss_of(dropping.model, rows[0])
    with torch.no_grad():
        assert kit.loss_of(dropping.model, rows[0]) > 0
    run = start("mlp", "tide", micro_batches=2)
    with pytest.raises(
        ContractError, match="order='relay', and the plan of tide is for order='depth-first'; give that"
    ):
        run.session.step([next(run.batches) for _ in range(2)], order="relay")


class Outside(nn.Module):
    """A residual stream kept outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return ((x - y) ** 2).mean()


def test_a_model_that_cannot_be_cut_is_refused_before_anything_runs(start: Callable[..., Any], kit: Any) -> None:
    torch.manual_seed(0)
    model, batches = Outside(), kit.batches(kit.mlp(False)[1])
    w = repeat_micro_batch(kit.workload_of(model, next(batches), name="outside"), 2)
    plan = kit.tight_plan("tide:order=relay", w, Settings(clip=False))
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2), watchdog_s=5.0)
    try:
        with pytest.raises(ContractError, match=r"order='relay' runs the model block by block.*is also used past it"):
            optimizer.session.step([next(batches) for _ in range(2)], order="relay")
        assert optimizer.session.state.cursor.moment == -1 and not optimizer.session.state.cursor.off_plan
    finally:
        optimizer.session.close(restore=False)


class Pair(nn.Module):
    """Blocks for one input, and a head for another input of its own length."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean() + self.head(y).square().mean()


def test_a_longer_second_input_does_not_run_on_plan() -> None:
    torch.manual_seed(0)
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, offloaded = executor.offload(
        model, optimizer, {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}, gpu_memory="64kB", micro_batches=2,
        device="virtual", policy="l2l",
    )  # fmt: skip
    rows = [{"x": torch.randn(8, 16), "y": torch.randn(8, 16)} for _ in range(2)]
    offloaded.session.step(rows)
    with pytest.raises(DoesNotFit, match="a new plan for this batch"):
        offloaded.session.step([{"x": row["x"], "y": torch.randn(1000, 16)} for row in rows])
    offloaded.session.step(rows)
    assert offloaded.session.deviations == 0, list(offloaded.session.deviation_log)
    offloaded.session.close()


class Towers(nn.Module):
    """Two stacks of blocks with a projection each, as in CLIP. Autograd takes the first projection last; a backward
    by parts takes both before any block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.heads = nn.ModuleDict({"first": nn.Linear(16, 8), "second": nn.Linear(16, 8)})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.first:
            x = torch.relu(block(x))
        x = self.heads["first"](x)
        for block in self.second:
            y = torch.relu(block(y))
        return (x * self.heads["second"](y)).square().mean()


def test_a_plan_that_is_never_followed_is_said_once_with_one_that_is(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(8, 16), "y": torch.randn(8, 16)} for _ in range(2)]

    def offloaded(policy: str) -> tuple[nn.Module, Any]:
        model = Towers()
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return executor.offload(model, adamw, rows[0], gpu_memory="64kB", micro_batches=2, policy=policy)

    _, optimizer = offloaded("l2l")
    for _ in range(8):
        optimizer.session.step(rows)
    assert optimizer.session.deviations == 8
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("none of 3 iterations followed the plan of l2l, last iteration 2: grad:heads.first came")
    assert said.endswith("make a plan in depth-first order (tide) and call loss.backward() in a loop of your own")
    optimizer.session.close()

    model, optimizer = offloaded("tide")  # what would do, does
    for _ in range(4):
        for row in rows:
            (model(**row) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.session.deviations == 0 and len(caplog.records) == 1
    optimizer.session.close()
