"""Layer-major iterations beside plain accumulation: equal to the bit, with the boundaries of blocks on the GPU or on
the host; those on the host leave the GPU and come back by the plan's own steps."""

from __future__ import annotations

import copy
import gc
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import executor
from executor.devices.torch_private import storage_key
from executor.models import enable_checkpointing
from pstar_sim.core.plan import Settings
from pstar_sim.errors import CannotPlan, ContractError
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.workload.workload import Workload, repeat_micro_batch

FAMILIES = ("mlp", "gpt2", "llama", "bert")
SPECS = {"gpu": "l2l", "host": "l2l:stash=host"}
LAYERS = 3


class Stack(nn.Module):
    """Equal blocks that recompute, between an embedding and a head. `way`: in which of several ways it calls them."""

    way = "plain"

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(24, 40)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(layers))
        self.head = nn.Linear(40, 24)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in [*self.layers] * (2 if self.way == "twice" else 1):
            if self.way == "drops" and torch.rand(()) < 0.4:
                continue
            if self.way == "named":
                x = checkpoint(layer, input=x, use_reentrant=False)
            else:
                x = checkpoint(layer, x, use_reentrant=False)
        return ((self.head(x) - y) ** 2).mean()


def build(kit: Any, family: str, layers: int = LAYERS) -> tuple[nn.Module, Iterator[Any]]:
    """A small model that recomputes each block, and its batches. gpt2 is tied and drops out everywhere."""
    torch.manual_seed(0)
    if family in ("mlp", "stack"):
        model, draw = kit.mlp(True)
        return model if family == "mlp" else Stack(layers), kit.batches(draw)
    transformers = pytest.importorskip("transformers")
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_head=2, n_embd=32, vocab_size=kit.VOCABULARY, n_positions=32, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"num_hidden_layers": layers, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                 "vocab_size": kit.VOCABULARY, "max_position_embeddings": 32}  # fmt: skip
        if family == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=2, **sizes))
        else:
            model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    model.config.use_cache = False
    enable_checkpointing(family, model)
    return model.train(), kit.batches(kit._text)


TRACED: dict[tuple[str, int, str], Workload] = {}
"""Captures of one micro-batch, by family, layers and way."""


@pytest.fixture
def relayed(kit: Any) -> Iterator[Callable[..., Any]]:
    """relayed(family, spec, micro_batches, ...): a prepared model beside its twin. Its plan leaves room on the GPU."""
    sessions: list[Any] = []

    def begin(
        family: str,
        spec: str,
        micro_batches: int,
        *,
        way: str = "plain",
        later: str = "plain",
        update: str = "step",
        clip: float | None = None,
        layers: int = LAYERS,
        gpu_bytes: int = 10**9,
        loop: str = "own",
    ) -> Any:
        model, batches = build(kit, family, layers)
        model.way = way
        twin = copy.deepcopy(model)
        if (family, layers, way) not in TRACED:
            TRACED[family, layers, way] = kit.workload_of(model, next(batches), name=family)
        w = repeat_micro_batch(TRACED[family, layers, way], micro_batches)
        settings = Settings(update=update, clip=clip is not None, loop=loop)
        plan = find_policy(spec)(w, kit.small_machine(gpu_bytes), settings)
        optimizer = executor.AdamW(lr=1e-2, weight_decay=0.1, max_grad_norm=clip, eager=update == "eager")
        model, prepared = executor.prepare(model, plan, optimizer, watchdog_s=20.0)
        sessions.append(prepared.session)
        model.way = twin.way = way if later == "plain" else later
        return kit.Run(model, prepared, kit.Reference(twin, 1e-2, 0.1, clip), plan, batches)

    yield begin
    for session in sessions:
        session.close(restore=False)


def both(run: Any, kit: Any, rows: Sequence[Any], seed: int = 7) -> None:
    """One iteration of the run and of its twin in the usual loop, with the same random numbers; losses are equal."""
    torch.manual_seed(seed)
    result = run.session.step(rows)  # in the order of the plan
    torch.manual_seed(seed)
    losses = []
    for draws, row in zip(torch.randint(2**62, (len(rows),)).tolist(), rows):
        torch.manual_seed(draws)
        losses.append(kit.loss_of(run.reference.model, row) / len(rows))
        losses[-1].backward()
        losses[-1] = losses[-1].detach()
    run.reference.step()
    assert result.loss == float(torch.stack(losses).sum())


def assert_equal_bits(run: Any) -> None:
    named = dict(run.model.named_parameters())
    states = run.optimizer.state_dict()["state"]
    for number, (name, p) in enumerate(run.reference.model.named_parameters()):
        assert torch.equal(named[name].detach().clone(), p.detach()), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[number][key], run.reference.optimizer.state[p][key])


def rows_of() -> list[Any]:
    """Every family, 1, 4 and 16 micro-batches, both places of the boundaries, eager and with clipping; those that run
    without --whole are four, one per family."""
    thin = {("mlp", 1, "host", 0.5), ("gpt2", 4, "host", None), ("llama", 4, "host", 0.5), ("bert", 4, "host", None)}
    every = [
        (family, count, place, clip)
        for family in FAMILIES for count in (1, 4, 16) for place in SPECS for clip in (None, 0.5)
    ]  # fmt: skip
    return [pytest.param(*row, marks=() if row in thin else pytest.mark.whole) for row in every]


@pytest.mark.parametrize(("family", "micro_batches", "place", "clip"), rows_of())
def test_steps_are_equal_to_the_bit(
    relayed: Callable[..., Any], kit: Any, whole: bool, family: str, micro_batches: int, place: str, clip: float | None
) -> None:
    """Twenty steps of three layers; without --whole two steps of two layers, and four of 48 rows. What goes to the host
    leaves the GPU."""
    update = "step" if clip else "eager"
    layers = LAYERS if whole else 2
    run = relayed(family, SPECS[place], micro_batches, update=update, clip=clip, layers=layers)
    for step in range(20 if whole else 2):
        both(run, kit, [next(run.batches) for _ in range(micro_batches)], seed=step)
    assert_equal_bits(run)
    session = run.session
    assert session.deviations == 0, list(session.deviation_log)
    stashes = session.plan.workload.stashes
    assert (place == "host") is bool(stashes)
    reports = session.state.run.stashes.reports
    assert {(r.block, r.micro_batch) for r in reports} == {(s.block, s.micro_batch) for s in stashes}
    for report in reports:
        assert 0 < report.freed_bytes == report.moved_bytes <= report.planned_bytes
        if family != "mlp":  # whose blocks differ in width
            assert report.moved_bytes == report.planned_bytes
    assert session.first.report.above == 0, str(session.first.report)


def test_optimal_plans_the_order_that_session_step_can_run(relayed: Callable[..., Any], kit: Any) -> None:
    """A plan for a loop of one's own is depth-first; session.step runs the faster plan, which is layer-major here."""
    run = relayed("stack", "optimal", 4, update="eager", loop="step", layers=4, gpu_bytes=30_000)
    assert run.session.plan.workload.relayed
    both(run, kit, [next(run.batches) for _ in range(4)])
    assert_equal_bits(run)
    assert run.session.deviations == 0


def test_a_streamed_chunks_sum_waits_on_the_gpu(
    relayed: Callable[..., Any], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = kit.small_machine
    slow = 1e5  # parameters per second of CPU Adam
    monkeypatch.setattr(
        kit, "small_machine", lambda size: replace(usual(size), host=replace(usual(size).host, adam_params_per_s=slow))
    )
    for update in ("eager", "step"):
        run = relayed("stack", "tide:streams=on,order=relay", 4, update=update, layers=4, gpu_bytes=60_000)
        assert "stream" in run.session.plan.modes and run.session.plan.workload.relayed
        for seed in range(3):
            both(run, kit, [next(run.batches) for _ in range(4)], seed=seed)
        assert_equal_bits(run)
        assert run.session.deviations == 0


def measured(run: Any, micro_batches: int, **options: Any) -> Any:
    """Figures of one iteration, in which Python collects no cycles: what a cycle holds would go sooner or later."""
    rows = [next(run.batches) for _ in range(micro_batches)]
    gc.collect()
    gc.disable()
    try:
        return run.session.measure_iteration(partial(run.session.step, rows, order="relay"), **options)
    finally:
        gc.enable()


def test_the_peak_does_not_depend_on_the_depth(relayed: Callable[..., Any]) -> None:
    """Executed in the order of the prediction, iterations of two depths have one peak, the predicted one."""
    peaks, predicted = set(), set()
    for layers in (4, 8):
        run = relayed("stack", "l2l:stash=host", 3, layers=layers, update="eager")
        timeline = play(run.plan)
        found = measured(run, 3, order=timeline)
        assert found.on_plan
        peaks.add(found.peak_gpu_bytes)
        predicted.add(timeline.peak_bytes["gpu"])
    assert len(predicted) == 1 and peaks == predicted


def test_the_bytes_over_the_link_are_the_plans(relayed: Callable[..., Any]) -> None:
    """Counted where they are copied. Those of parameters and gradients do not depend on the number of micro-batches,
    those of boundaries do."""
    model_bytes = set()
    for count, place in ((1, "gpu"), (4, "host"), (8, "gpu")):
        run = relayed("stack", SPECS[place], count, layers=4)
        moved = measured(run, count).moved_bytes
        assert moved == {way: run.plan.moved_bytes[way] for way in moved}
        stashed = sum(report.moved_bytes for report in run.session.state.run.stashes.reports)
        assert (stashed > 0) is (place == "host")
        model_bytes.add((moved["h2d"] - stashed, moved["d2h"] - stashed))
    assert len(model_bytes) == 1


def kept_on_host(run: Any) -> int:
    """Stashes whose bytes are on the host alone."""
    return sum(
        ref().only_on_host
        for refs in run.session.state.run.stashes._rooms.values()
        for ref in refs
        if ref() is not None
    )


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_what_stops_an_iteration_leaves_no_thread_and_no_stash(
    relayed: Callable[..., Any], kit: Any, interruptible: None
) -> None:
    """An error in a forward and in a backward, and Ctrl-C in both; the next iteration is on plan and equal. (After an
    error in a checkpointed forward, torch 2.6 leaves the checkpoint's hooks on saved tensors in force, in plain torch
    too.)"""
    run = relayed("stack", "tide:order=relay-host", 3)
    rows = [next(run.batches) for _ in range(3)]
    both(run, kit, rows)
    threads, calls = set(threading.enumerate()), []

    def fail(error: bool, call: int, *_: object) -> None:
        calls.append(call)
        if len(calls) == call:
            if error:
                raise ValueError("stop")
            signal.raise_signal(signal.SIGINT)

    closes = "gen.throw" in inspect.getsource(checkpoint)
    for error in (True, False):
        for call in (
            (2, 5) if closes or not error else (5,)
        ):  # the second micro-batch's forward, the second recomputation
            calls.clear()
            handle = run.model.layers[1].register_forward_pre_hook(partial(fail, error, call))
            with pytest.raises(ValueError if error else KeyboardInterrupt) as caught:
                run.session.step(rows, order="relay")
            handle.remove()
            del caught
            assert len(calls) == call
            run.optimizer.zero_grad()
            gc.collect()  # the error's frames
            assert set(threading.enumerate()) <= threads and kept_on_host(run) == 0
    both(run, kit, rows)
    assert_equal_bits(run)
    deviations = run.session.deviations
    both(run, kit, rows)
    assert run.session.deviations == deviations


def test_fewer_and_smaller_micro_batches_run_too(relayed: Callable[..., Any], kit: Any) -> None:
    """A smaller one on plan, fewer on demand, where stashes move in the caller's thread."""
    run = relayed("stack", "l2l:stash=host", 3, layers=4)
    full = next(run.batches)
    half = {key: value[:1] for key, value in full.items()}
    for rows in ([full, full, half], [full, full], [full, full, full]):
        both(run, kit, rows)
    assert_equal_bits(run)
    assert run.session.deviations == 2 and kept_on_host(run) == 0


def test_only_the_engine_runs_such_a_plan(relayed: Callable[..., Any], kit: Any) -> None:
    """With one micro-batch too, where the order of blocks is the usual one."""
    run = relayed("stack", "l2l:stash=host", 1, layers=6)
    row = next(run.batches)
    with pytest.raises(ContractError, match="order='depth-first', and the plan of l2l:stash=host is for order='relay'"):
        run.session.step([row], order="depth-first")
    with pytest.raises(ContractError, match=r"its iterations run in session\.step"):
        kit.loss_of(run.model, row)
    both(run, kit, [row])
    assert_equal_bits(run)


@pytest.mark.parametrize("spec", SPECS.values())
def test_layers_that_are_dropped_at_random_run_on_demand(relayed: Callable[..., Any], kit: Any, spec: str) -> None:
    """The plan has all layers; each micro-batch leaves out others, by its own random numbers."""
    run = relayed("stack", spec, 3, layers=4, later="drops")
    for step in range(5):
        both(run, kit, [next(run.batches) for _ in range(3)], seed=step)
    assert_equal_bits(run)
    assert run.session.deviations > 0 and kept_on_host(run) == 0


def test_blocks_that_are_called_twice(relayed: Callable[..., Any], kit: Any) -> None:
    """Both parts of a gradient are added before the next micro-batch's, as autograd adds them."""
    run = relayed("stack", "l2l", 3, way="twice")
    for step in range(3):
        both(run, kit, [next(run.batches) for _ in range(3)], seed=step)
    assert_equal_bits(run)
    assert run.session.deviations == 0
    with pytest.raises(
        CannotPlan, match=r"calls block layers\.0 more than once per micro-batch; boundaries on the host"
    ):
        relayed("stack", "l2l:stash=host", 3, way="twice")


def test_a_boundary_that_checkpoint_does_not_save_stays(relayed: Callable[..., Any], kit: Any) -> None:
    run = relayed("stack", "l2l:stash=host", 3, layers=4, way="named")
    both(run, kit, [next(run.batches) for _ in range(3)])
    assert_equal_bits(run)
    assert "layers.0 recomputes from what torch.utils.checkpoint does not save" in run.session.deviation_log[0]


def test_a_boundary_at_the_address_of_one_that_is_gone(relayed: Callable[..., Any]) -> None:
    """A storage that left the GPU is not taken for the next one at its address, which would stay on the GPU."""
    saves = relayed("stack", "l2l:stash=host", 1, layers=4).session.state.run.stashes.boundaries()
    before, after = torch.zeros(8), torch.ones(8)
    packed = saves.pack(before)
    assert saves.pack(before.view(2, 4))[0] is packed[0]  # one storage
    packed[0].let_go()
    saves.saved[storage_key(after)] = saves.saved.pop(storage_key(before))  # as if the address were the same
    kept = saves.pack(after)[0]
    assert kept is not packed[0] and kept.source.untyped_storage().data_ptr() == after.data_ptr()
    kept.let_go()
    saves.begin((after,))
    assert not saves.saved


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that the compiler reads
def test_compiled_blocks_and_autocast(relayed: Callable[..., Any], kit: Any) -> None:
    """Boundaries leave the GPU there too; under autocast they may be of another width than planned."""
    run = relayed("stack", "tide:order=relay-host", 3, layers=4)
    rows = [next(run.batches) for _ in range(3)]
    for layer in (*run.model.layers, *run.reference.model.layers):
        layer.compile(backend="eager")
    both(run, kit, rows)
    moved = sum(report.moved_bytes for report in run.session.state.run.stashes.reports)
    assert moved == sum(stash.bytes for stash in run.plan.workload.stashes)
    for layer in (*run.model.layers, *run.reference.model.layers):
        layer._compiled_call_impl = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        both(run, kit, rows)
    assert_equal_bits(run)


def test_loss_scaling_in_fp16(kit: Any) -> None:
    """Losses, parameters and the scale are those of the same micro-batches depth-first."""
    found = []
    for spec in ("tide", "tide:order=relay-host"):
        torch.manual_seed(0)
        model, batches = Stack(4).half(), kit.batches(kit.mlp(True)[1])
        rows = [{key: value.half() for key, value in next(batches).items()} for _ in range(3)]
        w = repeat_micro_batch(kit.workload_of(model, rows[0]), 3)
        plan = find_policy(spec)(w, kit.small_machine(10**9), Settings(clip=True))
        adam = executor.AdamW(lr=1e-2, max_grad_norm=0.5, loss_scale="dynamic")
        model, optimizer = executor.prepare(model, plan, adam, watchdog_s=20.0)
        session = optimizer.session
        torch.manual_seed(0)
        losses = [session.step(rows).loss for _ in range(2)]
        values = [p.detach().clone() for p in model.parameters()]
        found.append((losses, session.loss_scale, session.skipped_steps, values))
        assert session.deviations == 0
        session.close(restore=False)
    assert found[0][:3] == found[1][:3]
    assert all(torch.equal(a, b) for a, b in zip(found[0][3], found[1][3]))
