"""CUDA's rules of autocast over tensors of the CPU, held against torch's own kernels for CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from executor.capture import capture_module
from executor.devices.torch_private import autocast_operators
from executor.moments.autocast import IN_16_BITS, IN_THE_WIDEST, rules_of


class OnCuda(torch.Tensor):
    """A tensor that torch takes for one of CUDA, without values: what autocast makes of it needs no device."""

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, meta.shape, dtype=meta.dtype, device="cuda")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def meta(value: Any) -> Any:
            empty = isinstance(value, OnCuda)
            return torch.empty(value.shape, dtype=value.dtype, device="meta") if empty else value

        args, kwargs = tree_map(meta, (args, {**(kwargs or {}), **({"device": "meta"} if "device" in kwargs else {})}))
        return tree_map(lambda out: OnCuda(out) if isinstance(out, torch.Tensor) else out, func(*args, **kwargs))


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "pow": lambda half, full: half.pow(3.0),
    "2 ** x": lambda half, full: 2.0**half,
    "exp": lambda half, full: half.exp(),
    "log": lambda half, full: half.log(),
    "rsqrt": lambda half, full: half.rsqrt(),
    "reciprocal": lambda half, full: half.reciprocal(),
    "softplus": lambda half, full: F.softplus(half),
    "tanh": lambda half, full: half.tanh(),
    "gelu": lambda half, full: F.gelu(half),
    "silu": lambda half, full: F.silu(half),
    "sum": lambda half, full: half.sum(),
    "sum of rows": lambda half, full: half.sum(0),
    "sum in bf16": lambda half, full: half.sum(dtype=torch.bfloat16),
    "sum of integers": lambda half, full: half.to(torch.int64).sum(),
    "cumsum": lambda half, full: half.cumsum(0),
    "prod": lambda half, full: half.prod(),
    "norm": lambda half, full: half.norm(),
    "norm of rows": lambda half, full: half.norm(dim=0),
    "vector norm": lambda half, full: torch.linalg.vector_norm(half),
    "layer_norm": lambda half, full: F.layer_norm(half, (4,)),
    "group_norm": lambda half, full: F.group_norm(half, 2),
    "mse_loss": lambda half, full: F.mse_loss(half, half),
    "cat": lambda half, full: torch.cat([half, half]),
    "cat of two": lambda half, full: torch.cat([half, full]),
    "addcmul of two": lambda half, full: torch.addcmul(half, half, full),
    "addcmul": lambda half, full: torch.addcmul(half, half, half),
    "matmul": lambda half, full: full @ full,
    "einsum": lambda half, full: torch.einsum("ij,jk->ik", full, full),
    "linear": lambda half, full: F.linear(full, full),
    "exp in fp64": lambda half, full: full.double().exp(),
}


@pytest.mark.parametrize("name", CALLS)
def test_as_the_kernels_for_cuda(name: str) -> None:
    half, full = torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4)
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") leaves it off where there is no device
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_cache_enabled(False)
    try:
        expected = CALLS[name](OnCuda(half.to("meta")), OnCuda(full.to("meta"))).dtype
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.set_autocast_cache_enabled(True)
    with rules_of("cuda"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert CALLS[name](half, full).dtype == expected


DOCUMENTED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "softmax": (lambda half: half.softmax(-1), torch.float32),
    "log_softmax": (lambda half: half.log_softmax(-1), torch.float32),
    "cosine_similarity": (lambda half: F.cosine_similarity(half, half), torch.float32),
    "rms_norm": (  # no rule for it in torch 2.6
        lambda half: F.rms_norm(half, (4,)),
        torch.float32 if "rms_norm" in autocast_operators("CUDA") else torch.bfloat16,
    ),
    "dot with fp32": (lambda half: torch.dot(half[0], half[0].float()), torch.float32),
    "mv": (lambda half: torch.mv(half.float(), half[0].float()), torch.bfloat16),
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_as_documented_where_the_kernels_ask_for_a_device(name: str) -> None:
    call, expected = DOCUMENTED[name]
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    with rules_of("cuda"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(half).dtype == expected


def test_the_rules_end() -> None:
    half = torch.ones(4, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with rules_of("cuda"):
            assert half.exp().dtype == torch.float32
        assert half.exp().dtype == torch.bfloat16
        assert F.cross_entropy(half, torch.zeros(4, dtype=torch.int64)).dtype == torch.float32  # a rule of the CPU


def test_the_lists_name_operators_of_torch() -> None:
    """What a later torch renames would fall among those that run in fp32, in silence."""
    names = {name.partition(".")[0] for name in autocast_operators("CUDA")}
    assert names >= {"softmax", "layer_norm", "pow", "norm", "sum"}
    assert names >= IN_THE_WIDEST
    assert IN_16_BITS - names <= {"_scaled_dot_product_flash_attention", "cudnn_convolution_transpose"}


class Powers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2.0).mean()


def test_a_capture_for_cuda_has_the_bytes_of_its_casts() -> None:
    """1,024 x 64 values in bf16 leave the layer, 131,072 bytes. CUDA's pow casts them to fp32, 262,144 bytes that its
    backward needs, and its result has 262,144 bytes where the CPU's has 131,072. All of them are there when pow ends;
    on the CPU, where the layer's output stays, the mean's 2 bytes are there too."""

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(batch["x"])

    def peak(device: str) -> int:
        captured = capture_module(Powers(), {"x": torch.randn(1024, 64)}, loss=loss, device=device)
        return max(moment.peak_bytes for moment in captured.moments if moment.phase == "FWD")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak("cuda") - peak("cpu") == 262_144 + 262_144 - 131_072 - 2


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.layer(x), -1, dtype=torch.float32).mean()


def test_softmax_from_fp16_to_fp32_makes_no_copy_on_cuda() -> None:
    """1,024 x 64 values: the CPU's copy in fp32 has 262,144 bytes. There is none of bf16 either way: CUDA copies it."""

    def peak(device: str, dtype: str) -> int:
        captured = capture_module(Scores(), {"x": torch.randn(1024, 64)}, dtype=dtype, device=device)
        return max(moment.peak_bytes for moment in captured.moments if moment.phase == "FWD")

    assert peak("cpu", "fp16") - peak("cuda", "fp16") == 262_144
    assert peak("cpu", "bf16") == peak("cuda", "bf16") == peak("cpu", "fp16")


class Biased(nn.Module):
    """Attention whose mask is learned, as T5's bias of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 2, 64, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.layer(x).view(4, 64, 2, 32).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, self.bias.to(heads.dtype)).mean()


@pytest.mark.parametrize(
    ("autocast", "kept_bytes"),
    [
        # x, what the layer makes, the result; a sum for each row, a seed; the mean and its gradient
        (False, 3 * 65_536 + 2_048 + 16 + 2 * 4),
        (True, 65_536 + 3 * 32_768 + 8_320 + 16_384 + 2_048 + 16 + 2),  # also in bf16 x, the layer's weights, the mask
    ],
)
def test_attention_with_a_mask_that_is_learned_is_fused_on_cuda(autocast: bool, kept_bytes: int) -> None:
    """4 x 2 x 64 rows of 32 values. The CPU has no kernel for the gradient of a mask, and keeps scores of 64 a row."""

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return module(batch["x"])

    def captured(device: str) -> Any:
        return capture_module(Biased(), {"x": torch.randn(4, 64, 64)}, loss=loss, device=device)

    assert (captured("cpu").attention, captured("cuda").attention) == ("math", "efficient")
    assert max(m.peak_bytes for m in captured("cuda").moments if m.phase == "FWD") == kept_bytes
