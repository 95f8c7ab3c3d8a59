"""A plan made from a recorded warm-up: bytes exact, seconds near."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thinned import by_turns

import executor
from executor.measuring.rates import measure_virtual_machine
from executor.recording.record import record
from pstar_sim.core.plan import Settings
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.workload.workload import Workload


@functools.cache
def recorded(kit: Any, model: str, micro_batches: int) -> Workload:
    """Once for all policies."""
    module, draw = kit.build(model)
    captured = kit.workload_of(module, draw(torch.Generator().manual_seed(9)), micro_batches=micro_batches)
    machine = kit.small_machine(captured.peak_non_model_bytes + 10**6)
    batches = [draw(torch.Generator().manual_seed(k)) for k in range(micro_batches)]
    return record(
        module, batches, machine, name=model, optimizer=executor.AdamW(max_grad_norm=1.0), loss=kit.loss_of, timed=1
    )


@pytest.mark.parametrize(
    ("model", "micro_batches", "policy"),
    by_turns(
        [("mlp", 2), ("gpt2", 1), ("llama", 1), ("bert", 1)],
        [("zero_offload",), ("static_partition",), ("patrickstar",), ("tide",)],
        most=2,
    ),
)
def test_total_peak_is_exact(kit: Any, start: Callable[..., Any], policy: str, model: str, micro_batches: int) -> None:
    w = recorded(kit, model, micro_batches)
    plan = kit.tight_plan(policy, w, Settings(clip=True))
    predicted = play(plan)
    run = start(model, policy, micro_batches=micro_batches, clip=1.0, plan=plan)
    # Drawn beforehand, as a loader does: a batch counts from the first operator that reads it.
    rows = [next(run.batches) for _ in range(3 * micro_batches)]
    drawn = iter(lambda: rows.pop(), None)

    def iteration() -> None:
        """The usual loop, which holds a batch until it draws the next."""
        for _ in range(micro_batches):
            batch = next(drawn)
            loss = kit.loss_of(run.model, batch) / micro_batches
            loss.backward()
            loss = None
        run.optimizer.step()
        run.optimizer.zero_grad()

    iteration()
    measured = run.session.measure_iteration(iteration, predicted)
    assert measured.on_plan
    assert list(measured.non_model_bytes) == [m.peak_bytes for m in w.moments]
    assert measured.peak_gpu_bytes == predicted.peak_bytes["gpu"]
    assert measured.peak_host_bytes == predicted.peak_bytes["host"]


@pytest.mark.slow
def test_iteration_time_where_transfers_bind(kit: Any, start: Callable[..., Any], capsys: Any, whole: bool) -> None:
    """A run of each of two throttles (with --whole two). What a busy machine cannot spoil is asserted: no run is faster
    than a throttled link allows, and most of a step's bytes do cross it in the time of a step. How near the seconds are
    to what was predicted is measured by benchmarks/accuracy.py; this prints them."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=6, n_head=4, n_embd=192, vocab_size=512, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    config.use_cache = False
    ids = torch.randint(0, 512, (2, 48))
    batch = {"input_ids": ids, "labels": ids}
    rates = {"60 MB/s": 60e6, "120 MB/s": 120e6}
    plans: dict[str, Any] = {}
    model = transformers.GPT2LMHeadModel(config)
    size = sum(p.numel() * 4 for p in model.parameters())
    spec = executor.AdamW(max_grad_norm=1.0)
    w = record(model, [batch], kit.small_machine(10**8), name="gpt2", optimizer=spec, loss=kit.loss_of)
    base = kit.small_machine(w.peak_non_model_bytes + size // 3)
    for word, rate in rates.items():
        machine = measure_virtual_machine(base, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
        plans[word] = find_policy("tide")(w, machine, Settings(clip=True))
    predicted = {word: play(plan) for word, plan in plans.items()}
    measured = {word: _steps(kit, config, batch, plans[word], rate, runs=1 + whole) for word, rate in rates.items()}
    with capsys.disabled():
        for word, (seconds, _) in measured.items():
            print(f"\n{word}: predicted {predicted[word].iteration_s:.3f} s, measured {seconds:.3f} s a step", end="")
    for word, (seconds, copied) in measured.items():
        moved = predicted[word].moved_bytes
        for direction, size in copied.items():
            assert moved[direction] / 2 < size <= rates[word] * seconds


def _steps(kit: Any, config: Any, batch: Any, plan: Any, rate: float, *, runs: int) -> tuple[float, dict[str, float]]:
    """Seconds of a step in the fastest run, and the bytes that the link had carried by its end, by direction.
    Of a copy that is under way at the end nothing counts."""
    import transformers

    taken: list[tuple[float, dict[str, float]]] = []
    largest = max(plan.layout.payload_bytes(chunk.index, "param") for chunk in plan.layout.chunks)
    for _ in range(runs):
        model = transformers.GPT2LMHeadModel(config)
        model, optimizer = executor.prepare(model, plan, executor.AdamW(max_grad_norm=1.0), bandwidth=rate, check=False)
        backend = optimizer.session.backend
        kit.train_alone(model, optimizer, iter([batch]), 1)
        begun, copied = time.perf_counter(), backend.copied_bytes
        for _ in range(2):
            kit.train_alone(model, optimizer, iter([batch]), 1)
        ended = backend.copied_bytes
        seconds = time.perf_counter() - begun
        taken.append((seconds / 2, {way: (ended[way] - size - largest) / 2 for way, size in copied.items()}))
        optimizer.session.close(restore=False)
    return min(taken, key=lambda row: row[0])
