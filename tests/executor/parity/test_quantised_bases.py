"""QLoRA as peft and bitsandbytes build it: streamed under a plan, it trains as the same model does in plain torch."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from later import Later

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft, _ = Later("peft"), Later("bitsandbytes")
quantised = Later("tests.executor.quantised")

import pstar_sim as ps  # noqa: E402
from executor import AdamW, capture_module, prepare  # noqa: E402
from pstar_sim.cli import main  # noqa: E402
from pstar_sim.core.step import Kind  # noqa: E402
from pstar_sim.dtypes import BASES  # noqa: E402
from pstar_sim.errors import ContractError, ModelError  # noqa: E402
from pstar_sim.workload.workload import repeat_micro_batch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


def batches(micro_batches: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    draw = torch.Generator().manual_seed(5)
    for _ in range(3):
        rows = [torch.randint(512, (2, 32), generator=draw) for _ in range(micro_batches)]
        yield [{"input_ids": tokens, "labels": tokens} for tokens in rows]


def trained(model: Any, optimizer: Any, micro_batches: int) -> list[float]:
    losses = []
    for step in batches(micro_batches):
        for batch in step:
            loss = model(**batch).loss / micro_batches
            loss.backward()
            losses.append(loss.item())
            del loss  # the CPU's 8-bit product keeps its inputs as long as its graph lives
        optimizer.step()
        optimizer.zero_grad()
    return losses


def planned(model: Any, policy: str, gpu_memory: str, micro_batches: int) -> Any:
    workload = capture_module(model, next(batches(1))[0], name="qlora")
    workload = repeat_micro_batch(workload, micro_batches) if micro_batches > 1 else workload
    machine, settings = ps.machine("virtual", gpu_memory=gpu_memory), ps.Settings(clip=False)
    plan = ps.compare(workload, machine, policies=[policy], settings=settings).best().plan
    plan.check()
    return plan


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor) else one[key] == other[key]
        for key in one
    )


@pytest.mark.parametrize(
    ("kind", "policy", "gpu_memory", "micro_batches"),
    [
        pytest.param("nf4", "tide", "1.9MB", 1, marks=pytest.mark.whole),
        ("nf4", "optimal", "1.9MB", 3),
        pytest.param("nf4", "zero_infinity", "2.3MB", 2, marks=pytest.mark.whole),
        ("nf4-single", "tide", "1.9MB", 2),
        pytest.param("int8", "tide", "2.3MB", 2, marks=pytest.mark.whole),
        ("int8", "zero_infinity", "2.9MB", 1),
    ],
)
def test_streamed_as_resident(kind: str, policy: str, gpu_memory: str, micro_batches: int) -> None:
    """Each kind and each policy once; six rows with --whole."""
    plain = quantised.quantised_llama(kind)
    adapters = [p for p in plain.parameters() if p.requires_grad]
    wanted = trained(plain, torch.optim.AdamW(adapters, lr=1e-3, fused=True), micro_batches)

    model = quantised.quantised_llama(kind)
    plan = planned(model, policy, gpu_memory, micro_batches)
    base = {c.index for c in plan.layout.chunks if c.dtype == kind}
    matrices = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256)
    tensors = [t for t in plan.workload.tensors if t.dtype == kind]
    assert sum(t.numel for t in tensors) == matrices
    assert sum(t.bytes for t in tensors) == pytest.approx(matrices * BASES[kind].bytes_per_param, rel=0.03)
    moves = [step for step in plan.steps if step.chunk in base and step.kind in (Kind.FETCH, Kind.WRITEBACK)]
    assert {step.kind for step in moves} == {Kind.FETCH}
    assert all(step.bytes == plan.layout.payload_bytes(step.chunk, "param") for step in moves)

    model, optimizer = prepare(model, plan, AdamW(lr=1e-3), device="virtual")
    assert trained(model, optimizer, micro_batches) == wanted
    assert equal(peft.get_peft_model_state_dict(model), peft.get_peft_model_state_dict(plain))
    assert equal(model.state_dict(), plain.state_dict())  # codes and scales come from their chunks
    optimizer.session.close()
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    assert equal(torch.load(file), plain.state_dict())
    batch = next(batches(1))[0]
    assert torch.equal(model(**batch).loss, plain(**batch).loss)


def test_dora_streamed_as_resident() -> None:
    """Its norm reads the base's matrix once more, in the moment of an adapter: the chunk is there."""
    plain = quantised.quantised_llama("bf16", dora=True)
    adapters = [p for p in plain.parameters() if p.requires_grad]
    wanted = trained(plain, torch.optim.AdamW(adapters, lr=1e-3, fused=True), 2)
    model = quantised.quantised_llama("bf16", dora=True)
    plan = planned(model, "tide", "2.6MB", 2)
    assert any(step.kind is Kind.FETCH for step in plan.steps)
    model, optimizer = prepare(model, plan, AdamW(lr=1e-3), device="virtual")
    assert trained(model, optimizer, 2) == wanted
    state = peft.get_peft_model_state_dict(model)
    assert sum("lora_magnitude_vector" in name for name in state) == 2 * 4
    assert equal(state, peft.get_peft_model_state_dict(plain))
    optimizer.session.close()
    with pytest.raises(ModelError, match=r"self_attn\.q_proj' has DoRA beside a quantised matrix.*base in bf16"):
        capture_module(quantised.quantised_llama("nf4", dora=True), next(batches(1))[0])


def test_the_dequantised_matrix_is_counted() -> None:
    model = quantised.quantised_llama("nf4")
    workload = capture_module(model, next(batches(1))[0], name="qlora")
    forward = [m for m in workload.moments if m.module.endswith("mlp.down_proj") and m.name.startswith("begin")]
    assert len(forward) == 4
    for moment in forward:  # 64 tokens by 256 x 128: the matrix in bf16 is alive beside the output
        assert (1, 64, 256, 128) in moment.products
        assert moment.peak_bytes - moment.start_bytes >= 2 * 256 * 128


def test_other_blocks_are_refused() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = torch.nn.Sequential(bnb.nn.Linear4bit(128, 128, bias=False, quant_type="nf4"), torch.nn.Linear(128, 8))
    model[0].weight = bnb.nn.Params4bit(torch.randn(128, 128), blocksize=128, quant_type="nf4", module=model[0])
    model[0].to("cpu")
    with pytest.raises(ModelError, match=r"parameter '0\.weight' of shape \[128, 128\] has .* bytes with its scales"):
        capture_module(model, torch.randn(4, 128), loss=lambda m, x: m(x).sum())


def test_a_prepared_base_is_not_copied_without_its_scales() -> None:
    model = quantised.quantised_llama("nf4")
    plan = planned(model, "tide", "8MB", 1)
    model, optimizer = prepare(model, plan, AdamW(lr=1e-3), device="virtual")
    codes = model.get_parameter("base_model.model.model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(ContractError, match=r"k_proj\.weight' is quantised, and its scales are in its chunk; close"):
        copy.deepcopy(codes)
    optimizer.session.close()
    assert torch.equal(copy.deepcopy(codes).quant_state.absmax, codes.quant_state.absmax)


def test_traced_planned_and_run_by_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, plan, model = tmp_path / "q.parquet", tmp_path / "q.json", "py:quantised:build"
    monkeypatch.chdir(Path(__file__).parents[1])
    assert main(["trace", model, "--batch", "2", "--seq", "32", "-o", str(trace)]) == 0
    machine = ["--machine", "virtual", "--gpu-memory", "1.9MB", "--policy", "tide"]
    assert main(["plan", "--trace", str(trace), *machine, "-o", str(plan)]) == 0
    assert main(["run", str(plan), "--model", model, "--steps", "2"]) == 0


def test_a_checkpoint_holds_what_is_not_quantised_and_continues(tmp_path: Path) -> None:
    model = quantised.quantised_llama("nf4")
    plan = planned(model, "tide", "1.9MB", 1)
    model, optimizer = prepare(model, plan, AdamW(lr=1e-3), device="virtual")
    trained(model, optimizer, 1)
    optimizer.save(tmp_path / "kept")
    trained(model, optimizer, 1)
    wanted = model.state_dict()
    optimizer.session.close()

    other, again = prepare(quantised.quantised_llama("nf4"), plan, AdamW(lr=1e-3), device="virtual")
    again.load(tmp_path / "kept")
    trained(other, again, 1)
    assert equal(other.state_dict(), wanted)
    again.session.close()
