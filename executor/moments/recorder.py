"""An iteration's events, live bytes, reads and gradients, captured or recorded, as a Workload."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from executor.devices.dtypes import DTYPE_NAMES
from executor.devices.packed import form_of
from executor.devices.torch_private import storage_key
from executor.moments.hooks import ModuleEvent
from executor.moments.live_bytes import LiveStorages
from pstar_sim.dtypes import DTYPES, STORAGE
from pstar_sim.errors import ModelError
from pstar_sim.units import format_params
from pstar_sim.workload.kernels import CAPTURED
from pstar_sim.workload.optimizers import OptimizerSpec
from pstar_sim.workload.workload import Moment, Phase, Tensor, Use, UseKind, Workload

MOST_NAMED = 3  # modules that a note names
INPUTS = {"vision": "image", "visual": "image", "image": "image", "audio": "audio", "speech": "audio"}
"""A part of a module's name -> the input that the module takes."""


def describe_parameters(
    model: nn.Module, groups: Mapping[int, int] | None = None
) -> tuple[tuple[Tensor, ...], tuple[nn.Parameter, ...]]:
    """In the order of `named_parameters`, with tied names: one Parameter, or the same first byte of one storage.

    groups: by id(parameter), 0 where absent.

    Raises ModelError for a trainable one that is not fp32, bf16 or fp16.
    """
    tensors: list[Tensor] = []
    parameters: list[nn.Parameter] = []
    first: dict[tuple[int, int], int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dtype not in DTYPE_NAMES and parameter.requires_grad:
            known = ", ".join(DTYPES)
            raise ModelError(f"parameter {name!r} has dtype {parameter.dtype}; trainable parameters are {known}")
        place = (storage_key(parameter), int(parameter.storage_offset()))
        tied_to = first.get(place)
        if tied_to is None:
            first[place] = len(tensors)
        dtype, shape = DTYPE_NAMES.get(parameter.dtype, str(parameter.dtype)), tuple(map(int, parameter.shape))
        size = parameter.numel() * parameter.element_size()
        if (form := form_of(parameter)) is not None:
            dtype, shape = form
            size = STORAGE[dtype].stored(shape)
        tensors.append(
            Tensor(
                name=name,
                shape=shape,
                dtype=dtype,
                bytes=size,
                frozen=not parameter.requires_grad,
                tied_to=tied_to,
                group=(groups or {}).get(id(parameter), 0),
            )
        )
        parameters.append(parameter)
    return tuple(tensors), tuple(parameters)


def working_dtype(tensors: Collection[Tensor]) -> str:
    """With the most trainable bytes (the most bytes if none is trainable). Raises ModelError without a tensor."""
    sizes: Counter[str] = Counter()
    trainable = any(not t.frozen for t in tensors)
    for t in tensors:
        if t.tied_to is None and t.dtype in DTYPES and (not t.frozen or not trainable):
            sizes[t.dtype] += t.bytes
    if not sizes:
        raise ModelError("the model has no parameter in fp32, bf16 or fp16: a plan needs a parameter to place")
    return sizes.most_common(1)[0][0]


def attention_seen(kernels: Collection[str]) -> str:
    """Returns "flash", "efficient", "math" (a softmax of its own) or "none", by LiveStorages.kernels."""
    for word in ("flash", "efficient", "cudnn"):
        if any(word in kernel and "attention" in kernel for kernel in kernels):
            return "flash" if word == "cudnn" else word
    return "math" if any(k.startswith(("aten._softmax.", "aten._safe_softmax.")) for k in kernels) else "none"


def unused_modules(tensors: Sequence[Tensor], used: Collection[int]) -> Counter[str]:
    """Outermost modules without a used parameter, with their numbers of parameters.

    used: tensors, tied names left out.
    """
    ran: set[str] = set()  # modules with a parameter that is used, themselves or inside
    for index, tensor in enumerate(tensors):
        if (index if tensor.tied_to is None else tensor.tied_to) in used:
            ran.update(_modules_around(tensor.name))
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        module = next((name for name in _modules_around(tensor.name) if name not in ran), None)
        if module is not None and tensor.tied_to is None:
            sizes[module] += math.prod(tensor.shape)
    return sizes


def named_modules(sizes: Counter[str]) -> str:
    names = [name for name, _ in sizes.most_common(MOST_NAMED)]
    return ", ".join(names) + (f" and {len(sizes) - len(names)} more modules" if len(sizes) > len(names) else "")


def unused_note(tensors: Sequence[Tensor], used: Collection[int]) -> str:
    """A vision tower does not run without an image."""
    sizes = unused_modules(tensors, used)
    if not sizes:
        return ""
    do, its = ("does", "its") if len(sizes) == 1 else ("do", "their")
    missing = sorted({word for part, word in INPUTS.items() if any(part in name for name in sizes)})
    without = f"no {' and no '.join(missing)} in the batch: " if missing else ""
    return (
        f"{without}{named_modules(sizes)} {do} not run, "
        f"{its} {format_params(sizes.total())} parameters get no gradient and {its} activations are not counted"
    )


def _modules_around(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


class MomentRecorder:
    """Records an iteration from a clock (`on_event`), LiveStorages (`read`) and gradient hooks (`gradient`).

    inside: a forward is open or a backward runs; other reads raise.
    """

    def __init__(
        self,
        tensors: tuple[Tensor, ...],
        live: LiveStorages,
        *,
        inside: Callable[[], bool],
        now: Callable[[], float] | None = None,
    ) -> None:
        self.tensors = tensors
        self.live = live
        self._inside = inside
        self._now = now
        self._moments: list[Moment] = []
        self._uses: dict[Use, None] = {}  # tensors in order of arrival, each once
        self._firings: Counter[tuple[int, int]] = Counter()  # (micro-batch, tensor)
        self._event: ModuleEvent | None = None
        self._start_bytes = 0
        self._start_s = 0.0

    @property
    def current(self) -> ModuleEvent | None:
        return self._event

    def on_event(self, event: ModuleEvent) -> None:
        self._close()
        self._event = event
        live = self.live
        live.reset_peak()
        live.flops = live.bytes_read = live.bytes_written = 0
        live.products = []
        live.attentions = []
        live.operators = 0
        self._start_bytes = live.current
        if self._now is not None:
            self._start_s = self._now()

    def read(self, tensor: int) -> None:
        """Raises ModelError outside every module call."""
        if self._event is None or not self._inside():
            raise ModelError(
                f"parameter {self.tensors[tensor].name!r} is read outside every module call "
                f"({self.live.last_op}); move that code into the forward of the model or of one of its modules"
            )
        self._use(tensor, UseKind.READ)

    def gradient(self, tensor: int) -> int:
        """Returns how many gradients the parameter had in this micro-batch."""
        assert self._event is not None
        self._use(tensor, UseKind.GRADIENT)
        key = (self._event.micro_batch, tensor)
        self._firings[key] += 1
        return self._firings[key]

    def firings(self) -> dict[int, int]:
        """Tensor -> arrivals of its gradient in a micro-batch, at most."""
        most: dict[int, int] = {}
        for (_, tensor), count in self._firings.items():
            most[tensor] = max(most.get(tensor, 0), count)
        return most

    def without_gradient(self) -> set[int]:
        trainable = {index for index, t in enumerate(self.tensors) if not t.frozen and t.tied_to is None}
        return trainable - self.firings().keys()

    def finish(self) -> None:
        """Close the last moment with the bytes alive now."""
        self._close()
        self._event = None

    def workload(
        self,
        *,
        model: str,
        batch: int,
        sequence: int,
        source: str,
        attention: str | None = None,
        dtype: str | None = None,
        autocast: str | None = None,
        optimizer: OptimizerSpec | None = None,
        recorded_on: str | None = None,
        notes: str = "",
    ) -> Workload:
        """Called after "step". Header fields that are not given come from the record."""
        self.finish()
        if not self._moments or self._moments[-1].phase is not Phase.ADAM:
            raise ModelError(f"{model}: the recorded iteration does not end with optimizer.step()")
        if not any(use.kind is UseKind.GRADIENT for use in self._uses):
            raise ModelError(f"{model}: no gradient reached any parameter; is the loss connected to the model?")
        return Workload(
            kernels=CAPTURED,
            model=model,
            dtype=dtype or working_dtype(self.tensors),
            autocast=autocast,
            batch=batch,
            sequence=sequence,
            micro_batches=self._moments[-1].micro_batch + 1,
            checkpointing=any(m.phase is Phase.RECOMPUTE for m in self._moments),
            attention=attention or attention_seen(self.live.kernels),
            source=source,
            tensors=self.tensors,
            moments=tuple(self._moments),
            uses=tuple(self._uses),
            optimizer=optimizer or OptimizerSpec(),
            torch_version=torch.__version__,
            recorded_on=recorded_on,
            notes="; ".join(filter(None, (notes, unused_note(self.tensors, {use.tensor for use in self._uses})))),
        )

    def _use(self, tensor: int, kind: UseKind) -> None:
        tied_to = self.tensors[tensor].tied_to
        use = Use(moment=len(self._moments), tensor=tensor if tied_to is None else tied_to, kind=kind)
        self._uses[use] = None

    def _close(self) -> None:
        event, live = self._event, self.live
        if event is None:
            return
        duration_s: float | None = None
        if self._now is not None:
            duration_s = max(0.0, self._now() - self._start_s)
        self._moments.append(
            Moment(
                name=event.name,
                phase=event.phase,
                module=event.module,
                micro_batch=event.micro_batch,
                flops=live.flops,
                bytes_read=live.bytes_read,
                bytes_written=live.bytes_written,
                start_bytes=self._start_bytes,
                peak_bytes=live.peak,
                end_bytes=live.current,
                duration_s=duration_s,
                products=tuple(live.products),
                attentions=tuple(live.attentions),
                operators=live.operators,
            )
        )
