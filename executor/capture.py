"""Capture: one training iteration of any nn.Module under fake tensors, written down as a Workload.

It needs no GPU and no weights, and memory only for operators that fake tensors cannot describe (`moments/blind.py`).
One micro-batch runs forward and backward on fake CPU tensors, seen by the clock, storages and recorder of a real run.
Gradients leave the parameters as they become final. Bytes are logical, under the attention kernel that the workload
names.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from executor.contract import changes_nothing
from executor.descriptions import AdamW, Optimizer, check_groups, group_of
from executor.devices.dtypes import TORCH_DTYPES
from executor.devices.packed import form_of, mark_packed, scales_of, twin_of
from executor.devices.torch_private import (
    GROUPED_MM,
    LOCAL_SCALAR,
    TO_COPY,
    buffer_table,
    parameter_table,
    storage_key,
    writes_in_place,
)
from executor.models import (
    BuiltModel,
    attention_kernel,
    build,
    forward_loss,
    known_masks,
    map_batch,
    quiet,
    under_autocast,
    unpacked_sequences,
    unread_padding,
)
from executor.moments.autocast import rules_of
from executor.moments.beside import note_of, runs_beside, tensors_beside
from executor.moments.blind import Blind
from executor.moments.compiled import eagerly
from executor.moments.draws import Draws, drawn, host_draws, with_every_layer
from executor.moments.fakes import Fakes
from executor.moments.hooks import MomentClock, tensors_of
from executor.moments.live_bytes import LiveStorages, require_dense
from executor.moments.recorder import MomentRecorder, attention_seen, describe_parameters
from executor.moments.unseen import unseen
from executor.scaling import guard_boundary, needs_loss_scaling
from pstar_sim.arguments import choice
from pstar_sim.catalog.attention import ATTENTION, USUAL
from pstar_sim.catalog.model_shapes import is_model, model_entry
from pstar_sim.dtypes import AUTOCAST
from pstar_sim.errors import ModelError, PstarError
from pstar_sim.python310 import Unpack
from pstar_sim.workload.adapted import adapted, check_base
from pstar_sim.workload.adapter import Adapter, adapter, check_save, chosen_modules, saved_part
from pstar_sim.workload.axes import Axes, AxesGiven
from pstar_sim.workload.experts import experts_note
from pstar_sim.workload.optimizers import OPTIMIZERS
from pstar_sim.workload.workload import Workload, repeat_micro_batch

aten = torch.ops.aten
_GROUPED_MM = GROUPED_MM.default if GROUPED_MM is not None else None
_RECORD = "record a real iteration instead (executor.record, or pstar trace --device virtual)"


def capture(
    model: str | BuiltModel,
    *,
    batch: int = 1,
    sequence: int = 1024,
    micro_batches: int = 1,
    beside: Adapter | None = None,
    **axes: Unpack[AxesGiven],
) -> Workload:
    """Returns the workload of a model named as in `executor.models.build`, or of a built model, which keeps its own
    batch, sequence and axes whatever is given.

    micro_batches: all alike, per iteration.
    beside: the model is frozen but for what `workload.adapted` needs to put this adapter there.
    axes: as in `build`; with lora and base the model has these.

    Raises ModelError as `build`, `adapted` and `capture_module` do.
    """
    lora, base = _taken(axes)
    if isinstance(model, str):
        model = build(model, batch=batch, sequence=sequence, device="meta", **axes)
    if (frozen := beside or lora) is not None:
        _freeze(model.module, frozen)
    workload = capture_module(
        model.module,
        model.example_batch,
        name=model.name,
        batch=model.batch,
        sequence=model.sequence,
        attention=model.attention,
        autocast=model.autocast,
    )
    workload = adapted(workload, lora, base)
    if is_model(model.name):
        notes = (experts_note(model_entry(model.name)), workload.notes)
        workload = replace(workload, notes="; ".join(note for note in notes if note))
    return repeat_micro_batch(workload, micro_batches) if micro_batches != 1 else workload


def _taken(axes: AxesGiven) -> tuple[Adapter | None, str | None]:
    given = Axes(**axes).given
    lora, base = given.get("lora"), given.get("base")
    axes.pop("lora", None)
    axes.pop("base", None)
    check_base(lora, base)
    return None if lora is None else adapter(lora), base


def _freeze(module: nn.Module, beside: Adapter) -> None:
    classes = {name: type(part).__name__ for name, part in module.named_modules()}
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear) or classes[name] == "Conv1D"]
    head = getattr(module, "get_output_embeddings", lambda: None)()
    heads = [name for name, part in module.named_modules() if part is head]
    check_save(beside, (name for name, _ in module.named_parameters(remove_duplicate=False)))
    trained = {f"{name}.weight" for name in chosen_modules(beside, linear, heads)}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained or saved_part(beside, name) is not None)


def capture_variants(
    model: str, *, batch: int = 1, sequence: int = 1024, **axes: Unpack[AxesGiven]
) -> tuple[Workload, ...]:
    """Returns variants of one model: the batch, its half and its quarter (if whole), each with activations kept and, if
    the model can, recomputed.

    Raises ModelError as `capture` does, and for a factory whose batch is always the same."""
    out: list[Workload] = []
    can_recompute = True
    lora, base = _taken(axes)
    for size in (batch, batch // 2, batch // 4):
        if not size or batch % size or any(w.batch == size for w in out):
            continue
        for checkpointing in (False, True):
            if checkpointing and not can_recompute:
                continue
            try:
                made = build(
                    model, batch=size, sequence=sequence, device="meta", **(axes | {"checkpointing": checkpointing})
                )
            except ModelError:
                if not checkpointing:
                    raise
                can_recompute = False
                continue
            if made.batch != size:
                raise ModelError(
                    f"{model}: its batch is {made.batch}, and variants have batches of their own: give the factory a "
                    "parameter `batch`, or trace it without --variants"
                )
            out.append(capture(made, lora=lora, base=base))
    return tuple(out)


def capture_module(
    module: nn.Module,
    example_batch: Any,
    *,
    name: str | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    attention: str | None = None,
    groups: Any = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] = forward_loss,
    keep_gradients: bool = False,
    device: str = "cpu",
    autocast: str | None = None,
) -> Workload:
    """Returns the workload of one micro-batch of `module` on `example_batch`; both are left as they were.

    name: name of the model, by default its class.
    groups: `prepare`'s optimizer, or its groups alone, so that the plan is made for them.
    batch, sequence: by default the first two extents of the batch's first tensor.
    dtype: floating parameters, buffers and inputs are taken as if they were of this dtype (a name of DTYPES);
        None: as they are.
    attention: kernel of scaled_dot_product_attention, one of catalog/attention.py; None: torch's choice for these
        inputs on the device.
    loss: forward pass and loss, called once.
    keep_gradients: leave gradients in the parameters, as plain torch does, and count their bytes.
    device: type of the run's device ("cpu", "cuda"), by whose rules autocast casts and attention is fused.
    autocast: dtype of an autocast around the loss, by the rules of CUDA.

    Raises ModelError for a module that fake tensors cannot run (names module and operation), a parameter read outside
    every module call, a loss that reaches no parameter or runs a backward, a requested attention kernel that is not
    used; PlanError for a trainable parameter that is in no group.
    """
    name = name or type(module).__name__
    mark_packed(module)
    numbered = _numbered(module, groups)

    if attention is not None:
        choice("attention", attention, ATTENTION, error=ModelError)
    if autocast is not None:
        choice("autocast", autocast, AUTOCAST, error=ModelError)
        loss, device = under_autocast(loss, "cpu", autocast), "cuda"

    def run(draws: Draws) -> tuple[MomentRecorder, Blind, tuple[nn.Module, ...]]:
        firings: dict[int, int] = {}
        beside: tuple[nn.Module, ...] = ()
        while True:
            recorder, blind, others = _run(
                name, module, example_batch, dtype, attention, loss, firings, keep_gradients, numbered, beside, device,
                draws,
            )  # fmt: skip
            # Reentrant checkpointing of a shared layer accumulates several times, and the gradient may only be taken at
            # the last time. The first run counts the times and finds what runs beside the model; a second uses both.
            seen = {tensor: count for tensor, count in recorder.firings().items() if count > 1}
            if seen == firings and (beside or not others):
                return recorder, blind, beside
            firings, beside = seen, beside or others

    (recorder, blind, beside), _ = with_every_layer(run, lambda made: len(made[0].without_gradient()))
    kernel = attention_seen(recorder.live.kernels)
    wanted = ATTENTION[attention or USUAL].torch
    if attention is not None and kernel not in (wanted, "none"):
        raise ModelError(
            f"{name}: attention={attention!r} was asked for but the model ran {kernel!r}; "
            "the kernel is chosen in calls of torch's scaled_dot_product_attention"
        )
    shape = next((tuple(t.shape) for t in tensors_of(example_batch) if t.dim()), ())
    if batch is None:
        batch = int(shape[0]) if shape else 1
    if sequence is None:
        sequence = int(shape[1]) if len(shape) == 2 else 1
    kept = "gradients left in place" * keep_gradients
    return recorder.workload(
        model=name,
        batch=batch,
        sequence=sequence,
        source="capture",
        attention=attention if kernel == wanted else None,
        autocast=autocast,
        optimizer=OPTIMIZERS[groups.planned] if isinstance(groups, Optimizer) else None,
        notes="; ".join(filter(None, (*Axes(autocast=autocast).notes, kept, blind.notes, note_of(beside)))),
    )


def _numbered(module: nn.Module, groups: Any) -> list[int]:
    spec = groups if isinstance(groups, Optimizer) else AdamW(groups)
    by_id = group_of(spec.groups(module))
    check_groups(*describe_parameters(module), by_id)
    return [by_id.get(id(p), 0) for _, p in module.named_parameters(remove_duplicate=False)]


def _run(
    name: str,
    module: nn.Module,
    example_batch: Any,
    dtype: str | None,
    attention: str | None,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    firings: dict[int, int],
    keep_gradients: bool,
    numbered: Sequence[int],
    beside: Sequence[nn.Module],
    device: str,
    draws: Draws,
) -> tuple[MomentRecorder, Blind, tuple[nn.Module, ...]]:
    """Also the modules that ran beside `module`.

    firings: tensor index -> number of gradient firings, where more than one.
    beside: those known before, whose tensors count from the start.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # transformers asks for the alignment of experts in torch <= 2.10
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        inputs = stack.enter_context(fake_module(module, example_batch, mode, dtype))

        def fake(other: nn.Module) -> None:
            stack.enter_context(fake_module(other, (), mode))

        for other in beside:
            fake(other)
        others = stack.enter_context(runs_beside(module, fake))
        found, parameters = describe_parameters(module)
        tensors = tuple(replace(tensor, group=number) for tensor, number in zip(found, numbered))
        own = [i for i, t in enumerate(tensors) if t.tied_to is None]
        live = LiveStorages(
            [parameters[i] for i in own],
            itertools.chain(module.buffers(), tensors_beside(beside)),
            on_param_read=lambda i: recorder.read(own[i]),
        )
        for _, scale in itertools.chain.from_iterable(map(scales_of, module.modules())):
            live.ignore(scale.untyped_storage())
        clock = MomentClock(module, lambda event: recorder.on_event(event))
        stack.callback(clock.close)
        clock.listen()
        recorder = MomentRecorder(tensors, live, inside=lambda: clock.inside)
        if needs_loss_scaling(tensors):
            for handle in guard_boundary(module, lambda: 1.0):
                stack.callback(handle.remove)
        for index in own:
            if not tensors[index].frozen:
                hook = _GradientHook(recorder, index, firings.get(index, 1), keep_gradients)
                parameters[index].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if not (isinstance(inputs, Mapping) and "position_ids" in inputs):
            stack.enter_context(unpacked_sequences())
        stack.enter_context(unread_padding())
        stack.enter_context(eagerly())
        stack.enter_context(host_draws(draws))
        stack.enter_context(rules_of(device))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it reads the values of gradients
        stack.enter_context(quiet("torch._subclasses.fake_tensor"))  # torch logs the errors that it raises
        stack.enter_context(_readable_failures(name, module, live))
        shapes = RealShapes(mode, draws)
        stack.enter_context(known_masks(lambda tensor: shapes.value_of(tensor) is not None))
        with mode, shapes, live, attention_kernel(attention, device), torch.enable_grad():
            value = loss(module, inputs)
            clock.require_backwards(0, name)
            value.backward()  # type: ignore[no-untyped-call]
            del value
            clock.step()
            recorder.finish()  # the batch is alive until here, as in any loop
        return recorder, shapes.blind, tuple(others)


class NotOnFakeTensors(ModelError):
    """reason: module, operation and what fails, without advice."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason


class RealShapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives results of fake CPU tensors the form of real ones where they differ.

    The value of a tensor made of ones, and of numbers drawn from [0, 1] to decide ([Note: draws] in moments/draws.py),
    is known until the tensor is written: a model that makes a mask of ones asks whether all are one, and then works
    without it."""

    def __init__(self, mode: FakeTensorMode, draws: Draws | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = Fakes(mode)
        self.blind = Blind()
        self._draws = draws or Draws()
        self._values: dict[int, float] = {}  # storage -> value of all its elements

    def value_of(self, tensor: torch.Tensor) -> float | None:
        return self._values.get(storage_key(tensor)) if self._values else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if func is LOCAL_SCALAR.default and first is not None:
            known = self.value_of(first)
            if known is not None:
                return {torch.bool: bool, torch.int64: int}.get(first.dtype, float)(known)
        out = self._shaped(func, args, kwargs)
        for tensor in tensors_of(out):
            require_dense(tensor, func)
        answer = self._answer(func, args, out)
        if self._values or answer is not None:
            self._learn(func, args, out, first, answer)
        return out

    def _answer(self, func: Any, args: Any, out: Any) -> float | None:
        """A drawn array needs a value: what a model reads of it would be an error."""
        if drawn(func, args, out) and (self._draws.answers(out, alone=out.numel() == 1) or out.ndim == 1):
            return self._draws.answer
        return 1.0 if func in _ONES else None

    def _learn(self, func: Any, args: Any, out: Any, first: torch.Tensor | None, answer: float | None) -> None:
        made = {storage_key(t) for t in tensors_of(out)}
        taken = {storage_key(t) for t in tensors_of(args)}
        known = None if first is None else self.value_of(first)
        value = answer
        if value is None and known is not None and first is not None:
            value = _value_made(func, args, known, first.numel())
        for key in made - taken if not writes_in_place(func) else made | taken:
            self._values.pop(key, None)  # new storages (their address may be a freed one's), or written ones
            if value is not None:
                self._values[key] = value

    def _shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _GROUPED_MM and args[0].dtype in (torch.float32, torch.float16):
            return _grouped_product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
        out = self._fakes.run(func, args, kwargs)
        if func is aten.native_layer_norm_backward.default and out[0] is not None:
            return (out[0].contiguous(), *out[1:])  # real ones are
        of = _BATCH_NORMS.get(func)
        if of is None:
            return self.blind.see(func, args, kwargs, out)
        if of and not args[-1][0]:  # the fake backward makes a gradient of the input that is not asked for
            return (None, *out[1:])
        as_real = torch.empty_like(out[0], memory_format=suggest_memory_format(args[of]))
        return (out[0] if out[0].stride() == as_real.stride() else as_real, *out[1:])


_ONES = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
_ASKED: dict[Any, Callable[..., Any]] = {
    aten.lt.Scalar: operator.lt, aten.le.Scalar: operator.le, aten.gt.Scalar: operator.gt, aten.ge.Scalar: operator.ge,
    aten.eq.Scalar: operator.eq, aten.all.default: bool,
}  # fmt: skip
_KEEP = frozenset({TO_COPY.default, aten.clone.default, aten.index.Tensor})
_BATCH_NORMS = {aten.native_batch_norm.default: 0, aten.native_batch_norm_backward.default: 1}
"""Operator -> index of the argument whose memory format the first result has."""


def _value_made(func: Any, args: Any, known: float, numel: int) -> float | None:
    """known, numel: value of all elements of the first argument, and their number."""
    if func in _KEEP:
        return known
    if func is aten.sum.default:
        return known * numel
    if func in _ASKED:
        return float(_ASKED[func](known, *args[1:2]))
    return None


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: Any) -> torch.Tensor:
    # As torch's _create_grouped_mm_output_tensor: the operator's fake version is for bf16 alone.
    rows, columns = left.shape[-2], right.shape[-1]
    if left.dim() == 2 == right.dim():
        size = [ends.shape[0], rows, columns]
    elif left.dim() == 3 == right.dim():
        size = [left.shape[0], rows, columns]
    else:
        size = [rows, columns]
    each = 16 // left.dtype.itemsize if torch.version.cuda else 1  # torch's CUDA builds align rows to 16 bytes
    padded = -(-columns // each) * each
    return torch.empty_strided(size, [rows * padded, padded, 1][-len(size) :], dtype=left.dtype, device="cpu")


class _GradientHook:
    """Tells the recorder of each firing, and takes the gradient out at the last."""

    def __init__(self, recorder: MomentRecorder, tensor: int, last: int, keep: bool) -> None:
        self._recorder = recorder
        self._tensor = tensor
        self._last = last
        self._keep = keep

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._recorder.gradient(self._tensor) >= self._last and not self._keep:
            parameter.grad = None


class _Faker:
    """Makes fake CPU tensors of real, meta or fake ones; storages stay shared."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self._fakes = Fakes(mode)
        self._dtype = dtype
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.parameter = self._fakes.parameter

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        storage = tensor.untyped_storage()
        key = (storage_key(storage), dtype)
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        with torch.no_grad():
            base, whole = self._storages.get(key), False
            if base is None:
                whole = offset == 0 and storage.nbytes() == tensor.numel() * tensor.element_size()
                form = (size, stride) if whole else ((storage.nbytes() // tensor.element_size(),), (1,))
                base = self._storages[key] = self._fakes.empty(form[0], form[1], dtype)
            made: torch.Tensor = base if whole else base.as_strided(size, stride, offset)
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                made = made.detach().requires_grad_()
            return made


@contextlib.contextmanager
def fake_module(module: nn.Module, batch: Any, mode: FakeTensorMode, dtype: str | None = None) -> Iterator[Any]:
    """Parameters and buffers are fake, and ties stay ties. Yields the fake batch.

    As in a prepared model, `to()` and its like inside a forward raise ModelError if they would change something."""
    fake = _Faker(mode, TORCH_DTYPES[dtype] if dtype else None)
    memo: dict[int, torch.Tensor] = {}
    undo: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    states: list[Callable[[], None]] = []

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            made = fake(tensor)
            if isinstance(tensor, nn.Parameter):
                made = fake.parameter(made, tensor.requires_grad)
            memo[id(tensor)] = made
        return memo[id(tensor)]

    names = {id(part): name or "<root>" for name, part in module.named_modules()}

    def moved(self: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        with unseen():
            if changes_nothing(self, fn):
                return self
        raise ModelError(
            f"module {names.get(id(self), '?')!r} ({type(self).__name__}) converts its own parameters in a forward "
            "(to() or its like), and a plan is made for the dtypes that are there before; convert it, or the whole "
            "model, before tracing"
        )

    kept = [(part, part.__dict__.get("_apply")) for part in module.modules()]
    try:
        for part in module.modules():
            part.__dict__["_apply"] = types.MethodType(moved, part)
            tables: tuple[dict[str, Any], ...] = (parameter_table(part), buffer_table(part))
            for table in tables:
                for key, tensor in table.items():
                    if tensor is not None and getattr(tensor, "fake_mode", None) is not mode:
                        undo.append((table, key, tensor))
                        made = faked(tensor)
                        if isinstance(tensor, nn.Parameter) and form_of(tensor) is not None:
                            states.append(twin_of(part, key, made, fake))
                        table[key] = made
        yield map_batch(batch, fake)
    finally:
        for part, before in kept:
            if before is None:
                part.__dict__.pop("_apply", None)
            else:
                part.__dict__["_apply"] = before
        for table, key, tensor in undo:
            table[key] = tensor
        for give_back in states:
            give_back()


@contextlib.contextmanager
def _readable_failures(name: str, module: nn.Module, live: LiveStorages) -> Iterator[None]:
    try:
        yield
    except PstarError:
        raise
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ) as error:
        operation = getattr(error, "func", None) or live.last_op
        reason = {
            DataDependentOutputException: "its result depends on the values of tensors",
            DynamicOutputShapeException: "the shape of its result depends on the values of tensors",
        }.get(type(error), "it has no fake version")
        raise NotOnFakeTensors(
            f"{name}: {_where(error, module)} cannot run on fake tensors: {operation}: {reason}",
            f"{_RECORD}, or avoid the operation",
        ) from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise NotOnFakeTensors(
            f"{name}: {_where(error, module)} cannot run on fake tensors: {live.last_op}: "
            f"{type(error).__name__}: {text}",
            f"if it runs on real tensors, {_RECORD}",
        ) from error


def _where(error: BaseException, module: nn.Module) -> str:
    names = {id(part): part_name for part_name, part in module.named_modules()}
    found = "the loss"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module) and id(part) in names:
            found = f"module {names[id(part)] or '<root>'!r} ({type(part).__name__})"
    return found
