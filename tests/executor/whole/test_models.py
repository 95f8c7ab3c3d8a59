"""Models by name: presets, configurations, factories, and what is said of those that cannot be built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from executor.capture import capture
from executor.models import build, forward_loss
from pstar_sim.catalog.loader import load_machine
from pstar_sim.catalog.model_shapes import model_entry
from pstar_sim.cli.captured import CapturedJob
from pstar_sim.errors import ModelError, UnknownName
from pstar_sim.workload.workload import Phase

BEFORE_5 = int(transformers.__version__.partition(".")[0]) < 5
ROUTED = pytest.mark.skipif(BEFORE_5, reason="before transformers 5.0 experts find their tokens by value (nonzero)")

TINY_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 96,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "qwen2.5-0.5b", "bert-large", "vit-l-16", "175B"])
def test_presets_have_the_parameters_of_their_shape(name: str) -> None:
    built = build(name, batch=1, sequence=64, device="meta")
    assert sum(p.numel() for p in built.module.parameters()) == model_entry(name).params
    assert {p.dtype for p in built.module.parameters()} == {torch.bfloat16}
    assert built.module.training
    assert all(m.p == 0 for m in built.module.modules() if isinstance(m, nn.Dropout))


def test_real_models_are_seeded_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (build("tiny-gpt2", sequence=16, dtype="fp32", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(b.module.parameters()) for b in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(one.example_batch["input_ids"], two.example_batch["input_ids"])
    loss = forward_loss(one.module, one.example_batch)
    assert loss.shape == ()
    assert float(loss.detach()) == pytest.approx(5.5, abs=0.3)  # ln 256 = 5.545: nothing is learned yet


def test_hf_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_LLAMA))
    for spec in (f"hf:{path}", f"hf:{tmp_path}"):
        w = capture(spec, batch=2, sequence=16, dtype="fp32", checkpointing=True)
        assert (w.model, w.batch, w.sequence, w.checkpointing) == (spec, 2, 16, True)
        assert w.tensors[0].shape == (96, 32)
    assert build(f"hf:{path}", sequence=16).vocabulary == 96


def test_hf_classifier_gets_a_label_a_sequence(tmp_path: Path) -> None:
    values = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 32,
              "vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    built = build(f"hf:{tmp_path}", batch=3, sequence=16, dtype="fp32")
    assert built.example_batch["labels"].shape == (3,)
    assert forward_loss(built.module, built.example_batch).requires_grad


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a readable config.json"),
        ("[1]", "no field 'model_type'"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        ('{"model_type": "llama", "hidden_size": "2048"}', "field 'hidden_size'.* expected int, got str"),
    ],
)
def test_bad_hf_files(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=says):
        build(f"hf:{tmp_path}")


def test_hf_file_that_is_not_there() -> None:
    with pytest.raises(ModelError, match=r"nowhere\.json"):
        build("hf:nowhere.json")


def test_hf_name_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("We couldn't connect to the hub")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError, match=r"offline.*give hf:FILE"):
        build("hf:some-org/some-model")


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="gpt2-xl"):
        build("gpt2-xxl")


FACTORIES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x, y):
        return (self.layer(x) - y).square().mean()

def plain():
    return Net(), (torch.randn(6, 8), torch.randn(6, 8))

def sized(batch, sequence):
    return Net(), (torch.randn(batch, sequence, 8), torch.randn(batch, sequence, 8))

def wrong():
    return Net()

number = 3
"""


def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    w = capture("py:own_models:plain")
    assert (w.batch, w.sequence, w.dtype, w.params) == (6, 8, "fp32", 72)
    w = capture("py:own_models:sized", batch=2, sequence=5, dtype="bf16", micro_batches=2)
    assert (w.batch, w.sequence, w.dtype, w.micro_batches) == (2, 5, "bf16", 2)
    for spec, says in {
        "py:own_models:wrong": "return \\(nn.Module, example batch\\)",
        "py:own_models:number": "no callable 'number'",
        "py:no_such_module:f": "cannot import 'no_such_module'",
        "py:own_models": "not py:package.module:factory",
    }.items():
        with pytest.raises(ModelError, match=says):
            build(spec)
    with pytest.raises(ModelError, match="--no-checkpointing"):
        build("py:own_models:plain", checkpointing=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"batch": 0}, "batch must be at least 1"),
        ({"dtype": "fp8"}, "'fp8' is not known.*bf16"),
        ({"attention": "fast"}, "'fast' is not known.*flash"),
        ({"sequence": 200}, "200 tokens is longer than the model's 128 positions"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        build("tiny-gpt2", device="meta", **arguments)


def test_batches_go_in_and_losses_come_out() -> None:
    class Echo(nn.Module):
        def __init__(self, wrap: Any) -> None:
            super().__init__()
            self.scale, self.wrap = nn.Parameter(torch.ones(())), wrap

        def forward(self, x: torch.Tensor) -> Any:
            return self.wrap(self.scale * x.sum())

    x = torch.ones(3)
    wraps = (lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: (x, loss), lambda loss: loss.reshape(1))
    for wrap in wraps:
        for batch in (x, (x,), [x], {"x": x}):
            assert float(forward_loss(Echo(wrap), batch).detach()) == 3.0
    with pytest.raises(ModelError, match="a tuple of 1, in which there is no loss"):
        forward_loss(Echo(lambda loss: (x,)), x)


@ROUTED
def test_routed_experts_count_the_experts_a_token_goes_to(tmp_path: Path) -> None:
    """Mixtral: 32 tokens, 2 of 4 experts each, three products of 32 x 64 in an expert, forward and twice backward."""
    values = {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 96, "num_local_experts": 4,
              "num_experts_per_tok": 2, "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    w = capture(f"hf:{tmp_path}", batch=1, sequence=32, dtype="bf16")
    experts = 3 * 2 * 32 * 2 * (3 * 32 * 64)
    others = 3 * 2 * 32 * (4 * 32 * 32 + 32 * 4 + 32 * 96)  # q, k, v, o; router; head
    attention = (2 + 5) * 2 * 32 * 32 * 32  # two products forward, five in flash's backward
    (rotary,) = (m.flops for m in w.moments if m.name == "end:model.embed_tokens")
    assert rotary in (0, 2 * 4 * 32)  # frequencies times positions: a product before transformers 5.23
    assert w.flops == experts + others + attention + rotary


@ROUTED
def test_a_model_whose_code_runs_every_expert_on_every_token_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4: 32 tokens through 4 experts, though each is sent to one, and through a shared one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    values = {"model_type": "llama4_text", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64, "intermediate_size_mlp": 64,
              "vocab_size": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": False,
              "interleave_moe_layer_step": 1, "architectures": ["Llama4ForCausalLM"]}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    job = CapturedJob(model=f"hf:{tmp_path}", batch=1, seq=32, dtype="bf16", checkpointing=False)
    (w,) = job.of(load_machine("rtx4090-128gb"))
    assert (
        w.notes
        == "every token runs through all 4 experts of a layer, though sent to 1, as transformers codes llama4_text"
    )
    of_layer = [sum(m.flops for m in w.moments if m.phase is Phase.FWD and ".experts" in m.module)]
    assert of_layer == [2 * 32 * 4 * (3 * 32 * 64)]


@ROUTED
def test_routed_experts_in_fp32(tmp_path: Path) -> None:
    """As in bf16, at twice the bytes of what is not an index."""
    values = {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 96, "num_local_experts": 4}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    wide, narrow = (capture(f"hf:{tmp_path}", batch=1, sequence=32, dtype=dtype) for dtype in ("fp32", "bf16"))
    assert [m.name for m in wide.moments] == [m.name for m in narrow.moments]
    assert wide.flops == narrow.flops
    assert narrow.peak_non_model_bytes < wide.peak_non_model_bytes < 2 * narrow.peak_non_model_bytes


HF_SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "resnet": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, (2, 3, 224, 224), 1
    ),
    "clip": (
        {"text_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 96},
         "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
                           "image_size": 16, "patch_size": 8}},
        (2, 3, 16, 16), 5,
    ),
    "xlnet": ({"vocab_size": 96, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 64}, (2, 16), 16),
}  # fmt: skip
"""What a configuration may leave unsaid or say elsewhere: picture and patch size, the longest sequence (-1: any)."""


@pytest.mark.parametrize("model_type", HF_SIZES)
def test_hf_sizes_said_elsewhere_or_not_at_all(tmp_path: Path, model_type: str) -> None:
    values, shape, sequence = HF_SIZES[model_type]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    built = build(f"hf:{tmp_path}", batch=2, sequence=16, device="meta")
    assert next(iter(built.example_batch.values())).shape == shape
    assert built.sequence == sequence


@pytest.mark.filterwarnings("ignore:The class `Wav2Vec2ForMaskedLM`:FutureWarning")  # of transformers before 5.0
def test_hf_type_without_a_known_batch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wav2vec2"}))
    with pytest.raises(ModelError, match=r"('wav2vec2' has no class .* that reads text|no batch is known).*factory"):
        build(f"hf:{tmp_path}", device="meta")


@pytest.mark.skipif(BEFORE_5, reason="T5 calls torch's scaled_dot_product_attention since transformers 5.0")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of why each kernel is not used
def test_flash_asked_for_where_it_cannot_run(tmp_path: Path) -> None:
    values = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4,
              "vocab_size": 96, "decoder_start_token_id": 0, "pad_token_id": 0}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert capture(f"hf:{tmp_path}", batch=1, sequence=16, dtype="bf16").attention == "math"
    with pytest.raises(ModelError, match=r"its mask needs a gradient.*'math'"):
        capture(f"hf:{tmp_path}", batch=1, sequence=16, dtype="bf16", attention="flash")
