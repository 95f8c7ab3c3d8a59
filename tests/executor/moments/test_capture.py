"""Captures held against hand counts and against real iterations on the CPU, moment by moment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from executor.capture import capture, capture_module
from executor.models import build, enable_checkpointing, forward_loss
from executor.moments.hooks import ModuleEvent, MomentClock
from executor.moments.live_bytes import _FLOPS, LiveStorages
from executor.moments.recorder import MomentRecorder, describe_parameters
from pstar_sim.errors import ModelError
from pstar_sim.workload.workload import Phase, UseKind, Workload

FP32 = 4


def real(module: nn.Module, batch: Any, *, name: str = "model") -> Workload:
    """One real iteration of plain torch on the CPU, recorded by the same parts that a capture uses."""
    tensors, parameters = describe_parameters(module)
    own = [i for i, t in enumerate(tensors) if t.tied_to is None]
    live = LiveStorages([parameters[i] for i in own], module.buffers(), on_param_read=lambda i: recorder.read(own[i]))
    last = plain_firings(module, batch, [parameters[i] for i in own])
    clock = MomentClock(module, lambda event: recorder.on_event(event))
    clock.listen()
    recorder = MomentRecorder(tensors, live, inside=lambda: clock.inside)
    handles = []
    for place, index in enumerate(own):

        def take_out(parameter: torch.Tensor, index: int = index, place: int = place) -> None:
            if recorder.gradient(index) == last[place]:
                parameter.grad = None

        if not tensors[index].frozen:
            handles.append(parameters[index].register_post_accumulate_grad_hook(take_out))
    with live:
        forward_loss(module, batch).backward()
        clock.step()
        recorder.finish()
    clock.close()
    for handle in handles:
        handle.remove()
    return recorder.workload(model=name, batch=1, sequence=1, source="recorded")


def plain_firings(module: nn.Module, batch: Any, parameters: list[nn.Parameter]) -> list[int]:
    counts = [0] * len(parameters)
    handles = []
    for i, parameter in enumerate(parameters):

        def count(_: torch.Tensor, i: int = i) -> None:
            counts[i] += 1

        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(count))
    forward_loss(module, batch).backward()
    for handle in handles:
        handle.remove()
    module.zero_grad(set_to_none=True)
    return counts


def assert_same(captured: Workload, recorded: Workload) -> None:
    assert [m.name for m in captured.moments] == [m.name for m in recorded.moments]
    for a, b in zip(captured.moments, recorded.moments, strict=True):
        traffic = {"bytes_read": b.bytes_read, "bytes_written": b.bytes_written, "operators": b.operators}
        assert abs(a.operators - b.operators) <= 4  # fake tensors compute some masks and sums in other steps
        assert replace(a, **traffic) == b  # phase, module, flops and live bytes exactly
        # kernels lay results out as they like, and a copy that depends on it may come or go
        assert (a.bytes_read, a.bytes_written) == pytest.approx((b.bytes_read, b.bytes_written), rel=0.05)
    assert set(captured.uses) == set(recorded.uses)
    assert captured.tensors == recorded.tensors


def both(module: nn.Module, batch: Any) -> Workload:
    """Capture and real iteration of one module; asserts that they agree in every moment, and returns the capture."""
    captured = capture_module(module, batch, name="model")
    assert_same(captured, real(module, batch))
    return captured


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Linear(16, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x))).sum()


def test_mlp_bytes_by_hand() -> None:
    """32 rows: x is 32*8, the hidden layer 32*16 (ReLU in place), the output 32*4, the loss one number; all fp32."""
    w = both(Mlp(), torch.zeros(32, 8))
    x, hidden, out, one = 32 * 8 * FP32, 32 * 16 * FP32, 32 * 4 * FP32, FP32
    up = (8 * 16 + 16) * FP32  # gradients of weight and bias
    kept = x + hidden + 2 * one  # the loss and the gradient of one that it is seeded with
    assert [(m.name, m.phase, m.start_bytes, m.peak_bytes, m.end_bytes) for m in w.moments] == [
        ("begin:<root>", Phase.FWD, 0, 0, 0),  # the batch counts when an operator takes it
        ("begin:up", Phase.FWD, 0, x + hidden, x + hidden),
        ("end:up", Phase.FWD, x + hidden, x + hidden, x + hidden),  # ReLU in place
        ("begin:down", Phase.FWD, x + hidden, x + hidden + out, x + hidden + out),
        ("end:down", Phase.FWD, x + hidden + out, x + hidden + out + one, x + hidden + one),  # sum; the output goes
        ("end:<root>", Phase.FWD, x + hidden + one, kept, kept),
        ("grad:<root>", Phase.BWD, kept, kept, kept),  # the output's gradient is an expanded scalar
        # gradients of the hidden layer behind and before ReLU; `down.weight`'s (256 bytes) has come and gone before
        ("grad:down", Phase.BWD, kept, kept + 2 * hidden, kept),
        ("grad:up", Phase.BWD, kept, kept + up, x + 2 * one),
        ("backward-end", Phase.BWD, x + 2 * one, x + 2 * one, x),
        ("step", Phase.ADAM, x, x, x),
    ]
    # Two products of 32 x 8 x 16 (x needs no gradient) and three of 32 x 16 x 4, 2 flops a multiply-add.
    assert w.flops == 2 * (2 * 32 * 8 * 16 + 3 * 32 * 16 * 4)
    names = [t.name for t in w.tensors]
    assert [(w.moments[u.moment].name, names[u.tensor], u.kind) for u in w.uses] == [
        ("begin:up", "up.weight", UseKind.READ),
        ("begin:up", "up.bias", UseKind.READ),
        ("begin:down", "down.weight", UseKind.READ),
        ("grad:down", "down.weight", UseKind.READ),
        ("grad:down", "down.weight", UseKind.GRADIENT),
        ("grad:up", "up.bias", UseKind.GRADIENT),
        ("grad:up", "up.weight", UseKind.GRADIENT),
    ]
    assert w.moments[1].bytes_written == hidden
    assert w.moments[1].bytes_read == x + up


def test_a_batch_that_is_a_slice_counts_without_the_rest_of_its_data_set() -> None:
    data = torch.zeros(1000, 8)
    whole, sliced = (both(Mlp(), batch) for batch in (torch.zeros(32, 8), data[64:96]))
    assert [m.peak_bytes for m in sliced.moments] == [m.peak_bytes for m in whole.moments]


def test_of_a_storage_that_was_made_earlier_the_largest_part_counts() -> None:
    data = torch.zeros(100)
    parts = [data[:10], data[20:25], data[50:80:2], data[3:3], data]
    with LiveStorages([]) as live:
        for part, counted in zip(parts, (10, 10, 29, 29, 100), strict=True):
            part.sum()
            assert live.current == counted * FP32
        made = torch.zeros(50)
        made[:5].sum()  # a storage that was made inside counts whole
        assert live.current == 150 * FP32
        del data, part, parts
    assert live.current == 50 * FP32


def test_capture_leaves_the_module_as_it_was() -> None:
    model = Mlp()
    before = dict(model.named_parameters())
    capture_module(model, torch.zeros(32, 8), name="mlp")
    assert all(before[name] is p and p.grad is None for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.up(torch.ones(1, 8)).shape == (1, 16)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gpt2_fake_equals_real(checkpointing: bool) -> None:
    built = build("tiny-gpt2", batch=2, sequence=32, dtype="fp32", checkpointing=checkpointing)
    w = both(built.module, built.example_batch)
    assert w.attention == "flash"
    assert w.checkpointing is checkpointing
    # lm_head is tied to the embedding: read first and last, one gradient, in the embedding's own backward or later
    tied = next(t for t in w.tensors if t.tied_to is not None)
    assert tied.name == "lm_head.weight"
    assert w.tensors[tied.tied_to or 0].name == "transformer.wte.weight"
    assert [len(g) for g in w.gradients].count(0) < len(w.moments)
    assert sum(tied.tied_to in g for g in w.gradients) == 1
    assert sum(len(g) for g in w.gradients) == sum(t.tied_to is None for t in w.tensors)
    # built on meta, the same
    assert_same(capture("tiny-gpt2", batch=2, sequence=32, dtype="fp32", checkpointing=checkpointing), w)


def tiny_config(kind: str) -> Any:
    import transformers

    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    if kind == "bert":
        return transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=128, max_position_embeddings=64, hidden_dropout_prob=0.0,
                                    attention_probs_dropout_prob=0.0, **common)
        )  # fmt: skip
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **common)
        )
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, patch_size=8, hidden_dropout_prob=0.0,
                               attention_probs_dropout_prob=0.0, **{"num_labels": 10, **common})
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bert", "llama", "vit"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_transformers_fake_equals_real(kind: str, checkpointing: bool) -> None:
    model = tiny_config(kind).train()
    if checkpointing:
        enable_checkpointing(kind, model)
    tokens = torch.randint(0, 128, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    if kind == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    both(model, batch)


def test_a_mask_with_padding_is_as_a_real_run_has_it() -> None:
    """Its values are unknown: a capture takes it for one with padding, of which a real run makes an attention mask."""
    tokens, mask = torch.randint(0, 128, (2, 32)), torch.ones(2, 32, dtype=torch.int64)
    mask[1, :8] = 0
    both(tiny_config("llama").train(), {"input_ids": tokens, "attention_mask": mask, "labels": tokens})


class Residual(nn.Module):
    """One shared layer called twice, checkpointed each time or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.shared = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(2):
            if self.how == "plain":
                h = h + self.shared(h)
            else:
                h = h + checkpoint(self.shared, h, use_reentrant=self.how == "reentrant")
        return h.square().mean()


@pytest.mark.parametrize(("how", "firings"), [("plain", 1), ("non-reentrant", 1), ("reentrant", 2)])
def test_layer_called_twice(how: str, firings: int) -> None:
    w = both(Residual(how), torch.randn(4, 16))
    shared = next(i for i, t in enumerate(w.tensors) if t.name == "shared.0.weight")
    # Reentrant checkpointing runs a backward of its own for each call; its gradient is final at the second.
    assert sum(shared in moment for moment in w.gradients) == firings
    assert [m.name for m in w.moments].count("begin:shared.0") == (2 if how == "plain" else 4)
    assert [m.name for m in w.moments].count("grad:shared.0") == 2
    assert [m.name for m in w.moments].count("backward-end") == 1
    assert w.checkpointing is (how != "plain")
    assert w.moments[-1].end_bytes == 4 * 16 * FP32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(16, 2, batch_first=True)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, _ = self.mha(x, x, x, need_weights=False)
        return y.relu_(), y.mean()


def test_multihead_attention_reads_the_weights_of_a_module_that_is_never_called() -> None:
    w = both(Attention(), torch.randn(2, 8, 16))
    index = {t.name: i for i, t in enumerate(w.tensors)}
    reading = {w.moments[u.moment].name for u in w.uses if u.tensor == index["mha.out_proj.weight"]}
    assert "begin:mha" in reading
    assert not any("out_proj" in m.name for m in w.moments)
    # a parameter that nothing uses is in the table and has no use
    assert not any(u.tensor == index["unused.weight"] for u in w.uses)


def test_frozen_parameters_have_no_gradient() -> None:
    """LoRA: a frozen layer and two small trainable ones beside it."""

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(16, 16).requires_grad_(False)
            self.a, self.b = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.base(x) + self.b(self.a(x))).square().mean()

    w = both(Lora(), torch.randn(4, 16))
    assert {t.name for t in w.tensors if t.frozen} == {"base.weight", "base.bias"}
    assert sorted(w.tensors[i].name for g in w.gradients for i in g) == ["a.weight", "b.weight"]
    assert w.trainable_params == 2 * 2 * 16


def test_several_dtypes_and_buffers() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.norm = nn.BatchNorm1d(16)
            self.wide = nn.Linear(16, 64).to(torch.bfloat16)
            self.register_buffer("table", torch.zeros(100))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.wide(self.norm(self.first(x)).bfloat16()).float().mean()}

    w = both(Mixed(), torch.randn(4, 16))
    assert w.dtype == "bf16"
    assert {t.dtype for t in w.tensors} == {"fp32", "bf16"}
    # buffers count from the start: 100 numbers, running mean and variance, a count in int64
    assert w.moments[0].start_bytes == (100 + 16 + 16) * FP32 + 8


def test_micro_batches_repeat_and_arguments_reach_the_header() -> None:
    one = capture("tiny-gpt2", batch=2, sequence=32, dtype="bf16")
    three = capture("tiny-gpt2", batch=2, sequence=32, dtype="bf16", micro_batches=3)
    assert (three.batch, three.sequence, three.micro_batches, three.dtype, three.source) == (
        2,
        32,
        3,
        "bf16",
        "capture",
    )
    assert len(three.moments) == 3 * (len(one.moments) - 1) + 1
    assert three.flops == 3 * one.flops
    assert three.torch_version == torch.__version__


def test_attention_kernels() -> None:
    """Math keeps batch * heads * sequence^2 scores, flash and efficient do not."""
    peaks = {}
    for kernel in ("flash", "efficient", "math"):
        w = capture("tiny-gpt2", batch=1, sequence=128, dtype="bf16", attention=kernel)
        assert w.attention == kernel
        peaks[kernel] = w.peak_non_model_bytes
    assert peaks["math"] > peaks["flash"] + 2 * 4 * 128 * 128 * 2
    assert peaks["efficient"] == pytest.approx(peaks["flash"], rel=0.05)


class _ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.router(x)
        return y.sum() if y.max().item() > 0 else y.mean()


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_module_that_fake_tensors_cannot_run() -> None:
    with pytest.raises(ModelError, match=r"module 'inner' \(_ReadsValues\).*_local_scalar_dense.*values") as raised:
        capture_module(_Outer(_ReadsValues()), torch.zeros(3, 4), name="outer")
    assert "\n" not in str(raised.value)


def test_wrong_shapes_name_module_and_operation() -> None:
    with pytest.raises(ModelError, match=r"module 'inner' \(Linear\).*addmm"):
        capture_module(_Outer(nn.Linear(4, 4)), torch.zeros(3, 5), name="outer")


def test_parameter_read_outside_every_module_call() -> None:
    def regularised(model: nn.Module, batch: Any) -> torch.Tensor:
        return forward_loss(model, batch) + model.up.weight.norm()  # type: ignore[union-attr,operator,no-any-return]

    with pytest.raises(ModelError, match=r"'up\.weight' is read outside every module call.*forward"):
        capture_module(Mlp(), torch.zeros(32, 8), name="mlp", loss=regularised)


def test_a_loss_with_a_gradient_penalty_is_refused_by_name() -> None:
    """torch.autograd.grad inside the loss is a second backward, for which a plan has no moments."""

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        out = module(batch["x"]).square().mean()
        (slope,) = torch.autograd.grad(out, module.weight, create_graph=True)
        return out + slope.square().sum()

    with pytest.raises(ModelError, match=r"Linear: the loss runs a backward of its own \(torch.autograd.grad"):
        capture_module(nn.Linear(4, 4), {"x": torch.ones(2, 4)}, loss=loss)


def test_model_without_a_loss() -> None:
    with pytest.raises(ModelError, match=r"Linear returns a tensor of shape \(3, 2\).*return a scalar loss"):
        capture_module(nn.Linear(4, 2), torch.zeros(3, 4), name="linear")
    with pytest.raises(ModelError, match="does not depend on any trainable parameter"):
        capture_module(Mlp().requires_grad_(False), torch.zeros(32, 8), name="mlp")


def test_clock_recovers_from_a_backward_that_raised_and_counts_micro_batches() -> None:
    model, events = Mlp(), []
    clock = MomentClock(model, events.append)
    clock.listen()
    loss = forward_loss(model, torch.zeros(32, 8))

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    handle = model.up.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss.backward()
    handle.remove()
    for _ in range(2):
        forward_loss(model, torch.zeros(32, 8)).backward()
    clock.step()
    forward_loss(model, torch.zeros(32, 8))
    clock.close()
    forward_loss(model, torch.zeros(32, 8)).backward()
    ends = [e.micro_batch for e in events if e.kind == "backward-end"]
    assert ends == [0, 1]  # the one that raised ended no micro-batch
    assert [e.micro_batch for e in events if e.name == "begin:<root>"] == [0, 0, 1, 0]
    assert events[-1].name == "end:<root>"


def test_views_of_one_chunk_are_told_apart() -> None:
    """Two parameters in one storage, as the executor lays them out: each read names its own."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    chunk = torch.randn(32)
    for i in range(2):
        model[i].weight.data = chunk[16 * i : 16 * i + 16].view(4, 4)
    reads: list[int] = []
    with LiveStorages(list(model.parameters()), on_param_read=reads.append) as live:
        y = model[1](torch.ones(1, 4))
        assert set(reads) == {1}
        model[0](y)
        assert set(reads) == {0, 1}
        with live.paused():
            chunk.mul_(2.0)
    assert live.peak == 3 * 4 * FP32


def test_recorder_times_moments_by_the_clock_it_is_given() -> None:
    now = 0.0
    live = LiveStorages([])
    tensors, _ = describe_parameters(nn.Linear(2, 2))
    recorder = MomentRecorder(tensors, live, inside=lambda: True, now=lambda: now)
    recorder.on_event(ModuleEvent("begin", "", "begin:<root>", Phase.FWD, 0))
    now = 3.0
    recorder.read(0)
    recorder.on_event(ModuleEvent("backward-end", "", "backward-end", Phase.BWD, 0))
    recorder.gradient(0)
    recorder.on_event(ModuleEvent("step", "", "step", Phase.ADAM, 0))
    now = 3.5
    w = recorder.workload(model="m", batch=1, sequence=1, source="recorded", recorded_on="here")
    assert [m.duration_s for m in w.moments] == [3.0, 0.0, 0.5]
    assert replace(w, notes="x").recorded_on == "here"


def test_peak_with_gradients_in_place_equals_that_of_torch_memory_tracker() -> None:
    """Wide layers on few rows: the peak lies in the backward, where the gradients are most of it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from executor.capture import fake_module

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    model, batch = Wide(), torch.zeros(8, 256)
    gradients = 4 * (256 * 256 + 256) * FP32
    kept = capture_module(model, batch, name="wide", keep_gradients=True)
    taken = capture_module(model, batch, name="wide")
    assert kept.peak_non_model_bytes > gradients > 2 * taken.peak_non_model_bytes
    mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), MemTracker()
    with fake_module(model, batch, mode) as inputs, mode:
        tracker.track_external(model)
        with tracker:
            forward_loss(model, inputs).backward()
        (row,) = tracker.get_tracker_snapshot("peak").values()
    beside = {str(kind): size for kind, size in row.items()}
    theirs = beside["Total"] - sum(size for kind, size in beside.items() if kind.endswith(("Parameter", "PARAM")))
    assert kept.peak_non_model_bytes == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("values_wide", [4, 6])
def test_grouped_query_attention_flops_by_hand(values_wide: int) -> None:
    """4 query heads share 2 key heads. Batch 2, 5 queries, 7 keys, 4 wide: forward, two products for each query head;
    backward five, of which three are as wide as the queries. Fake tensors of every kernel have the same shapes."""
    aten = torch.ops.aten
    query, key = torch.empty(2, 4, 5, 4, device="meta"), torch.empty(2, 2, 7, 4, device="meta")
    value, gradient = torch.empty(2, 2, 7, values_wide, device="meta"), torch.empty(2, 4, 5, values_wide, device="meta")
    scores = 2 * 4 * 5 * 7
    for kernel in ("cudnn_attention", "efficient_attention", "flash_attention", "flash_attention_for_cpu"):
        name = f"_scaled_dot_product_{kernel}"
        assert _FLOPS[getattr(aten, name)](query, key, value) == 2 * scores * (4 + values_wide)
        backward = _FLOPS[getattr(aten, f"{name}_backward")](gradient, query, key, value)
        assert backward == 2 * scores * (3 * 4 + 2 * values_wide)


def test_grouped_query_attention_is_captured() -> None:
    """`enable_gqa`, so that the kernel itself sees fewer key heads: the real iteration agrees, and the flops are those
    of the projections (two products each, the batch needs no gradient) and the attention, whose kernel computes the
    scores again; torch 2.6 sends it to plain products on a CPU, which keep them."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            query = self.query(x).view(batch, length, 4, 4).transpose(1, 2)
            key = self.key(x).view(batch, length, 2, 4).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True).sum()

    w = both(Grouped(), torch.randn(2, 8, 16))
    tokens, scores = 2 * 8, 2 * 4 * 8 * 8
    attention = w.flops - 2 * 2 * tokens * 16 * (16 + 8)
    assert attention - 2 * scores * (4 + 4) in (2 * scores * (3 * 4 + 2 * 4), 2 * scores * (2 * 4 + 2 * 4))


class _Seeing(nn.Module):
    """Text, with a picture or without: a tower of 2 x 20 parameters and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(4, 4)
        self.vision_tower = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.projector = nn.Linear(4, 4)
        self.projector.weight = self.text.weight

    def forward(self, x: torch.Tensor, picture: torch.Tensor | None = None) -> torch.Tensor:
        out = self.text(x)
        return (out if picture is None else out + self.projector(self.vision_tower(picture))).sum()  # type: ignore


def test_a_part_that_does_not_run_is_noted() -> None:
    """Without a picture the tower and the projector do not run; the projector's weight is the text's, which does."""
    x = torch.zeros(3, 4)
    for w in (capture_module(_Seeing(), {"x": x}), real(_Seeing(), {"x": x})):
        assert w.notes == (
            "no image in the batch: vision_tower does not run, its 40 parameters get no gradient and its activations "
            "are not counted"
        )
    assert not capture_module(_Seeing(), {"x": x, "picture": x}).notes


def test_a_fused_kernel_of_another_name_keeps_what_flash_keeps() -> None:
    flash, third = (
        capture("gpt2", batch=1, sequence=16, dtype="bf16", checkpointing=True, attention=kernel)
        for kernel in ("flash", "fa3")
    )
    assert (flash.attention, third.attention) == ("flash", "fa3")
    assert third.moments == flash.moments
