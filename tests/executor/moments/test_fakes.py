"""Remembered results of operators on fake tensors beside those that torch gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.capture import capture_module
from executor.devices.torch_private import dispatch_keys
from executor.moments import fakes
from executor.moments.fakes import Fakes

aten = torch.ops.aten


class Mode(FakeTensorMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.ran = 0

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        self.ran += args[0] is not torch.ops.prim.device.default
        return super().dispatch(*args, **kwargs)


def made(mode: Mode, *size: int, **how: Any) -> torch.Tensor:
    with mode:
        return torch.empty(*size, **how)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_KNOWN", {})


def described(out: Any, taken: list[torch.Tensor]) -> Any:
    if isinstance(out, (tuple, list)):
        return type(out), [described(part, taken) for part in out]
    if not isinstance(out, torch.Tensor):
        return out
    place = out.untyped_storage()._cdata
    return (
        type(out), out.shape, out.stride(), out.storage_offset(), out.dtype, out.device, out.requires_grad,
        out.untyped_storage().nbytes(), dispatch_keys(out), [out is one for one in taken],
        [place == one.untyped_storage()._cdata for one in taken],
    )  # fmt: skip


def answers(mode: Mode, func: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """What is made of the arguments, and how many operators run for it."""
    taken = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    with mode:
        before = mode.ran
        out = Fakes(mode).run(func, args, kwargs)
        return described(out, taken), mode.ran - before


OPERATORS: dict[str, Callable[[Mode], tuple[Any, ...]]] = {
    "a product": lambda mode: (aten.mm.default, made(mode, 3, 4), made(mode, 4, 5)),
    "a view": lambda mode: (aten.t.default, made(mode, 3, 4)),
    "a view that the schema does not know": lambda mode: (aten._unsafe_view.default, made(mode, 3, 4), [12]),
    "two views": lambda mode: (aten.split.Tensor, made(mode, 6, 4), 3),
    "several results": lambda mode: (
        aten.native_layer_norm.default, made(mode, 3, 4), [4], made(mode, 4), made(mode, 4), 1e-5,
    ),
    "results and none": lambda mode: (
        aten.native_layer_norm_backward.default, made(mode, 3, 4), made(mode, 3, 4), [4], made(mode, 3, 1),
        made(mode, 3, 1), made(mode, 4), None, [True, True, False],
    ),
    "written in place": lambda mode: (aten.add_.Tensor, made(mode, 3, 4), made(mode, 4)),
    "of another dtype": lambda mode: (aten.gt.Scalar, made(mode, 3, 4), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_the_second_answer_is_torchs_and_nothing_runs(name: str) -> None:
    mode = Mode()
    func, *args = OPERATORS[name](mode)
    first, ran = answers(mode, func, *args)
    assert ran
    other = Mode()
    func, *args = OPERATORS[name](other)
    assert answers(other, func, *args) == (first, 0)
    with other:
        assert described(func(*args), [one for one in args if isinstance(one, torch.Tensor)]) == first


def test_what_is_made_is_what_torch_makes() -> None:
    mode = Mode()
    x, like = Fakes(mode).empty((3, 4), (1, 3), torch.bfloat16), made(mode, 4, 3, dtype=torch.bfloat16)
    with mode:
        assert described(x, []) == described(like.t(), [])
    assert x.__dict__ == like.__dict__
    for requires_grad in (True, False):
        parameter, torchs = Fakes(mode).parameter(x, requires_grad), nn.Parameter(x, requires_grad)
        with mode:
            assert described(parameter, [x]) == described(torchs, [x])
        assert parameter.__dict__ == torchs.__dict__
        assert isinstance(parameter, nn.Parameter) and parameter.is_leaf
    assert not isinstance(x, nn.Parameter)


@pytest.mark.parametrize("name", ["gpt2", "mlp", "bert"])
def test_a_second_capture_is_that_of_torch_alone(name: str, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = kit.build(name, checkpointing=True)
    same_as_alone(monkeypatch, model, draw(torch.Generator().manual_seed(0)))


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.bias = nn.Parameter(torch.zeros(1, 2, 12, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            heads = layer(x).view(2, 12, 2, 16).transpose(1, 2)
            x = F.scaled_dot_product_attention(heads, heads, heads, self.bias).transpose(1, 2).reshape(2, 12, 32)
        return (x**2).mean()


def test_a_result_with_padding_has_it_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the bias's gradient are padded to 16 elements: torch's own memory leaves those of the last row out."""
    same_as_alone(monkeypatch, Biased(), {"x": torch.randn(2, 12, 32)}, device="cuda")


def same_as_alone(monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: Any, **how: Any) -> None:
    remembered = [capture_module(model, batch, **how) for _ in range(2)]
    monkeypatch.setattr(Fakes, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    alone = capture_module(model, batch, **how)
    assert [(w.moments, w.uses) for w in remembered] == [(alone.moments, alone.uses)] * 2


def test_numbers_of_other_types_are_other_arguments() -> None:
    mode = Mode()
    x = made(mode, 3, dtype=torch.int64)
    assert [answers(mode, aten.add.Tensor, x, one)[0][4] for one in (1, 1.0, True, 1)] == [
        torch.int64, torch.float32, torch.int64, torch.int64,
    ]  # fmt: skip
    with torch.random.fork_rng():
        torch.set_default_dtype(torch.float64)
        try:
            assert answers(mode, aten.add.Tensor, x, 1.0)[0][4] == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_what_changes_an_argument_runs() -> None:
    mode = Mode()
    for _ in range(2):
        x = made(mode, 3)
        answers(mode, aten.resize_.default, x, [5])
        assert x.shape == (5,)
        y = made(mode, 3, 4)
        answers(mode, aten.t_.default, y)
        assert y.shape == (4, 3)


def test_views_of_inference_tensors_are_of_their_kind() -> None:
    """torch refuses to save them for a backward."""
    mode = Mode()
    answers(mode, aten.view.default, made(mode, 3, 4), [12])
    with torch.inference_mode():
        x = made(mode, 3, 4)
    with mode:
        assert Fakes(mode).run(aten.view.default, (x, [12]), {}).is_inference()


def test_a_view_leaves_a_storage_without_bytes_as_it_is() -> None:
    mode = Mode()
    for _ in range(2):
        x = made(mode, 3, 4)
        x.untyped_storage().resize_(0)
        answers(mode, aten.view.default, x, [12])
        assert x.untyped_storage().nbytes() == 0


def test_operators_that_are_not_torchs_run() -> None:
    """What their fake versions ask beside arguments no key tells."""
    widths = {"layer": 3}

    @torch.library.custom_op("fakes_test::project", mutates_args=())
    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x.new_empty(len(x), widths[name])

    project.register_fake(lambda x, name: x.new_empty(len(x), widths[name]))
    mode = Mode()
    with mode:
        for widths["layer"] in (3, 5):
            out = Fakes(mode).run(torch.ops.fakes_test.project.default, (made(mode, 2, 2), "layer"), {})
            assert out.shape == (2, widths["layer"])


def test_what_is_known_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "_MOST", 5)
    mode = Mode()
    for width in range(1, 12):
        for _ in range(2):
            assert answers(mode, aten.neg.default, made(mode, width))[0][1] == (width,)
        assert len(fakes._KNOWN) <= 5


def test_an_argument_that_is_given_twice_is_not_mistaken() -> None:
    """Which of the two is returned, or viewed, the first answer does not tell."""
    mode = Mode()
    x, y, z = made(mode, 3), made(mode, 3), made(mode, 3)
    answers(mode, aten.mul.out, x, y, out=x)
    assert answers(mode, aten.mul.out, x, y, out=z)[0][9] == [False, False, True]
    assert answers(mode, aten.mul.out, x, y, out=x)[0][9] == [True, False, True]


def test_values_that_are_known_and_tensors_of_other_modes_are_torchs() -> None:
    mode = Mode()
    with mode:
        known = torch.tensor(3)
    for _ in range(2):
        with mode:
            assert int(Fakes(mode).run(aten.add.Tensor, (known, 1), {})) == 4
    other = made(Mode(), 3)
    assert all(answers(mode, aten.neg.default, other)[1] for _ in range(2))
