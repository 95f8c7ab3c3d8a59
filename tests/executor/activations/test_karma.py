"""A plan of karma, whose blocks keep, recompute and swap, carried out beside plain torch: equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

import executor
from executor.models import enable_checkpointing
from pstar_sim.core.plan import Settings
from pstar_sim.core.step import Kind
from pstar_sim.policy.systems.karma import karma, ways
from pstar_sim.workload.workload import Workload, repeat_micro_batch

LAYERS, BATCH, SEQUENCE, VOCABULARY = 6, 4, 16, 40
SETTINGS = Settings(clip=False)


def model_of_layers() -> Any:
    """Dropout too: a recomputed block draws what it drew before."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=SEQUENCE, bos_token_id=0,
        resid_pdrop=0.1, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def text(draw: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=draw)
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def way(kit: Any) -> Workload:
    """Two micro-batches; the machine has room for parameters and for about half of the activations."""
    made = []
    for checkpointing in (True, False):
        model = model_of_layers()
        if checkpointing:
            enable_checkpointing("gpt2", model)
        made.append(repeat_micro_batch(kit.workload_of(model, text(torch.Generator().manual_seed(9))), 2))
    recomputed, kept = made
    room = (recomputed.peak_non_model_bytes + kept.peak_non_model_bytes) // 2
    machine = kit.small_machine(room + 2 * sum(t.bytes for t in kept.tensors))
    found: Workload = next(
        w for w in ways(recomputed, kept, machine, SETTINGS) if len({how for _, how in w.activations}) == 3
    )
    return found


def both(kit: Any, model: Any, twin: Any, optimizer: Any) -> Iterator[tuple[float, float]]:
    """Losses of micro-batches; both models draw the same random numbers."""
    reference = kit.Reference(twin, 1e-2, 0.1, None)
    draw = torch.Generator().manual_seed(1)
    for step in range(3):
        batches = [text(draw) for _ in range(2)]
        losses = []
        for each in (model, twin):
            torch.manual_seed(step)
            losses.append([])
            for batch in batches:
                loss = kit.loss_of(each, batch) / 2
                loss.backward()
                losses[-1].append(float(loss.detach()))
        for one in (optimizer, reference):
            one.step()
        optimizer.zero_grad()
        yield from zip(*losses)


def test_equal_to_plain_torch_to_the_bit(kit: Any, way: Workload) -> None:
    plan = karma(way, kit.small_machine(way.peak_non_model_bytes + 2 * sum(t.bytes for t in way.tensors)), SETTINGS)
    plan.check()
    assert {s.kind for s in plan.steps} >= {Kind.STASH_OUT, Kind.STASH_IN, Kind.CPU_UPDATE}
    model = model_of_layers()
    twin = copy.deepcopy(model)
    model, optimizer = executor.prepare(model, plan, executor.AdamW(lr=1e-2, weight_decay=0.1), watchdog_s=5.0)
    session = optimizer.session
    assert all(mine == theirs for mine, theirs in both(kit, model, twin, optimizer))
    theirs = dict(twin.named_parameters())
    for t in session.timetable.chunk_of:
        name = session.plan.workload.tensors[t].name
        assert torch.equal(session.reader.current_value(t), theirs[name].detach()), name
    assert session.deviations == 0
    assert [r.moved_bytes for r in session.state.run.stashes.reports] == [s.bytes for s in plan.workload.stashes]
    session.close(restore=False)
