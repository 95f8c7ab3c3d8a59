"""Equal bytes, counted by somebody else: every torch copy between a host slab and the accelerator's memory, in whatever
thread, over the zoo. The engine's own counters are not asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import executor
from executor.capture import capture_module
from executor.devices.backend import VirtualBackend
from pstar_sim.core.plan import Plan, Settings, moved_bytes
from pstar_sim.core.step import Queue, Step

WORDS, TIMES, ITERATIONS = 96, 12, 2
Draw = Callable[[torch.Generator], dict[str, torch.Tensor]]


class LinkCount:
    """Wraps `torch.Tensor.copy_`. A storage is the host's if it is a slab, the accelerator's if it is a payload."""

    def __init__(self) -> None:
        self.host: set[int] = set()
        self.gpu: set[int] = set()
        self.kept: list[torch.Tensor] = []  # so that an address stays whose it is
        self.bytes = {"h2d": 0, "d2h": 0}
        self._lock = threading.Lock()

    def copied(self, target: torch.Tensor, source: Any) -> None:
        if not isinstance(source, torch.Tensor):
            return
        to, from_ = (t.untyped_storage()._cdata for t in (target, source))
        direction = ""
        if from_ in self.host and to in self.gpu:
            direction = "h2d"
        elif from_ in self.gpu and to in self.host:
            direction = "d2h"
        if direction:
            with self._lock:
                self.bytes[direction] += target.numel() * target.element_size()


class CountedBackend(VirtualBackend):
    """Tells the count which memory is whose, and nothing else."""

    def __init__(self, count: LinkCount) -> None:
        super().__init__()
        self._count = count

    def host_slab(self, size_bytes: int) -> torch.Tensor:
        return self._known(super().host_slab(size_bytes), self._count.host)

    def gpu_payload(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._known(super().gpu_payload(numel, dtype), self._count.gpu)

    def _known(self, made: torch.Tensor, whose: set[int]) -> torch.Tensor:
        self._count.kept.append(made)
        whose.add(made.untyped_storage()._cdata)
        return made


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[LinkCount]:
    counting = LinkCount()
    copy = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        counting.copied(self, source)
        return copy(self, source, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    yield counting


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.layers = kind(32, 48, 2, batch_first=True)
        self.out = nn.Linear(48, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = self.out(self.layers(self.words(input_ids))[0])
        return nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())


class Speech(nn.Module):
    """Convolutions, BatchNorm and a bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(8, 32, 3, padding=1), nn.BatchNorm1d(32), nn.GELU(), nn.Conv1d(32, 32, 3, stride=2, padding=1)
        )
        self.layers = nn.LSTM(32, 32, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(64, WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.out(self.layers(self.front(x).transpose(1, 2))[0])
        return nn.functional.cross_entropy(found.flatten(0, 1), y.flatten())


def words(draw: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (2, TIMES), generator=draw)
    return {"input_ids": ids, "labels": ids.clone()}


def sounds(*shape: int, name: str = "input_features", labels: str = "labels") -> Draw:
    return lambda draw: {
        name: torch.randn(2, *shape, generator=draw),
        labels: torch.randint(3, WORDS, (2, TIMES), generator=draw),
    }


_SIDES = {f"{side}_{what}": 2 if what == "attention_heads" else 1 if what == "layers" else 64
          for side in ("encoder", "decoder") for what in ("layers", "attention_heads", "ffn_dim")}  # fmt: skip
_SPEECH = {**_SIDES, "d_model": 32, "vocab_size": WORDS, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1,
           "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


def families(rows: Any) -> dict[str, tuple[Callable[[], nn.Module], Draw]]:
    """Those of the semantics table, and the encoder-decoders, recurrent and convolutional models that it lacks."""
    hf = rows.transformer
    whisper = hf(
        "WhisperConfig:WhisperForConditionalGeneration", **_SPEECH, num_mel_bins=8, max_source_positions=12,
        max_target_positions=32,
    )  # fmt: skip
    speech2text = hf(
        "Speech2TextConfig:Speech2TextForConditionalGeneration", **_SPEECH, input_feat_per_channel=8,
        max_source_positions=32, max_target_positions=32, conv_channels=16,
    )  # fmt: skip
    bart = hf("BartConfig:BartForConditionalGeneration", **_SPEECH, max_position_embeddings=32)
    return {
        **{name: (lambda make=make: rows.no_dropout(make()), draw)
           for name, (make, draw) in {**rows.ARCHITECTURES, **rows.EXPERTS}.items()},
        "bart": (bart, words),
        "whisper": (whisper, sounds(8, 24)),
        "speech2text": (speech2text, sounds(24, 8)),
        "lstm": (lambda: Recurrent(nn.LSTM), words),
        "gru": (lambda: Recurrent(nn.GRU), words),
        "rnn": (lambda: Recurrent(nn.RNN), words),
        "conv and lstm": (Speech, sounds(8, 2 * TIMES, name="x", labels="y")),
        "mlp": (lambda: nn.Sequential(), words),  # the kit's
    }  # fmt: skip


NAMES = (
    "llama", "qwen2", "gemma", "gpt_neox", "opt", "bloom", "phi", "bert", "t5", "vit", "mixtral", "qwen2_moe", "bart",
    "whisper", "speech2text", "lstm", "gru", "rnn", "conv and lstm", "mlp",
)  # fmt: skip
POLICIES = ("tide", "patrickstar", "optimal", "zero_offload")


def begun(plan: Plan, session: Any) -> dict[str, int]:
    """What the plan's queues have run ahead into iterations that have not begun, by the plan's own bytes."""
    steps: list[Step] = []
    for queue in (Queue.H2D, Queue.D2H):
        order = [plan.steps[i] for i in session.state.run.progress.order.get(queue, [])]
        iteration, index = session.queues.standing().get(queue, (session.iteration, 0))
        assert order == [] or iteration >= session.iteration, "an iteration that has ended has copies left"
        steps += order * (iteration - session.iteration) + order[:index]
    return {direction: moved_bytes(steps, 1)[direction] for direction in ("h2d", "d2h")}


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, POLICIES[i % 4], marks=[pytest.mark.whole] * (i % 8 not in (0, 2, 5, 7)))
        for i, name in enumerate(NAMES)
    ],
)
def test_copies_counted_outside_the_engine_are_the_plans(
    kit: Any, rows: Any, count: LinkCount, name: str, policy: str
) -> None:
    """Over two iterations, both ways; and `status()` gives each single iteration the plan's bytes. Without --whole, of
    every second family, with each policy."""
    torch.manual_seed(0)
    zoo = families(rows)
    assert set(zoo) == set(NAMES)
    model, draw = kit.build("mlp") if name == "mlp" else (zoo[name][0](), zoo[name][1])
    batches = kit.batches(draw)
    w = capture_module(model, next(batches), name=name)
    plan = kit.tight_plan(policy, w, Settings(update="step", clip=False))
    model, optimizer = executor.prepare(model, plan, executor.AdamW(), backend=CountedBackend(count))
    session = optimizer.session
    planned = {direction: plan.moved_bytes[direction] for direction in ("h2d", "d2h")}
    assert sum(planned.values()) > 0
    try:
        session.drain()
        filled, early = dict(count.bytes), begun(plan, session)  # the chunks, and copies of the first iteration
        session.queues.resume()
        for _ in range(ITERATIONS):
            kit.train_alone(model, optimizer, batches, 1)
            session.drain()
            links = session.status().links
            assert {direction: use.moved_bytes for direction, use in links.items()} == planned
            session.queues.resume()
        session.drain()
        ahead = begun(plan, session)
        assert session.deviations == 0, list(session.deviation_log)
        for direction, size in planned.items():
            copied = count.bytes[direction] - (filled[direction] - early[direction])
            assert copied == ITERATIONS * size + ahead[direction], direction
    finally:
        session.close(restore=False)
