"""Optimizers: the states that each keeps, and what one update reads, writes and computes.

An optimizer whose states have scales, rows and columns, or differ for matrices is a row of `OPTIMIZERS`.

[Note: masters] Every optimizer keeps a 4-byte master of the parameter (`MASTER_LIST`), from which an update writes the
working list. Without fp32 masters (pure bf16) it is the parameter itself.

[Note: granularity] Some updates need several elements at a time: 8-bit states share a scale per block, Muon and
Adafactor need a whole matrix. No block crosses the end of a tensor, slice or part. Ranks' slices do cut matrices: such
a plan has the right bytes, and the executor refuses it.

[Note: traffic] An update reads and writes each state, reads the 2-byte gradient and writes the 2-byte parameter: with
two fp32 moments and the master 2 * (4 + 4 + 4) + 2 + 2 = 28 bytes per parameter.

The executor runs rows of `executor.devices.rules.RULES`; others can only be planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from pstar_sim.arguments import text
from pstar_sim.catalog.machine import ADAM_BYTES_PER_PARAM
from pstar_sim.dtypes import MASTER, STORAGE
from pstar_sim.errors import UnknownName
from pstar_sim.words import meant

Shape = Sequence[int]

MASTER_LIST = "param32"
"""The list of master copies, from which an update writes the working list."""
MASTERS = (MASTER, "none")
"""Whether the optimizer keeps fp32 masters of narrower parameters ([Note: masters])."""
_IN_AND_OUT = 2 + 2  # bytes of the gradient that an update reads, and of the parameter that it writes
_BLOCK = 256  # elements of 8-bit states that share a scale (bitsandbytes, torchao)
_LEAST_8_BIT = 4096  # elements; smaller tensors keep fp32 moments (bitsandbytes' min_8bit_size)
_CPU_SHARES = {"lion": 0.43, "adafactor": 0.2, "adafactor-vectors": 0.29, "sgd-momentum": 0.63}
"""Rule -> parameters per second of its update on the CPU over those of torch's fused AdamW, where torch computes it
operator by operator, each a pass over memory. `pstar calibrate` measures them."""
_CPU_CORE_RATES = {"adamw-8bit": 0.043e9, "lion-8bit": 0.06e9, "adamw-bnb": 0.11e9, "lion-bnb": 0.16e9}
"""Rule -> parameters per second of its update on one thread, which computes longer than it waits for memory:
bitsandbytes 0.50."""
_NS_STEPS = 5  # Newton-Schulz iterations of torch.optim.Muon


@dataclass(frozen=True, kw_only=True, slots=True)
class StateList:
    """The bytes are their sum.

    per_block: of `States.block` elements.
    per_row, per_column: of each matrix (more dimensions are a stack).
    """

    name: str
    per_element: int = 0
    per_block: int = 0
    per_row: int = 0
    per_column: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class States:
    """name: the update's rule.
    block, whole: elements, or whole tensors, updated together ([Note: granularity]).
    traffic_per_param: bytes through memory, None: [Note: traffic].
    cpu_share: rate on the CPU over fused AdamW's, as the executor runs both.
    cpu_core_params_per_s: on one thread, where arithmetic binds. None for both: an update takes as long as its traffic.
    products: (batches, m, k, n) of an update's bf16 matrix products, by shape.
    """

    name: str
    lists: tuple[StateList, ...]
    block: int = 1
    whole: bool = False
    traffic_per_param: int | None = None
    products: Callable[[Shape], Sequence[tuple[int, int, int, int]]] | None = None

    @property
    def cpu_share(self) -> float | None:
        return _CPU_SHARES.get(self.name)

    @property
    def cpu_core_params_per_s(self) -> float | None:
        return _CPU_CORE_RATES.get(self.name)

    @property
    def names(self) -> tuple[str, ...]:
        """In storage order."""
        return tuple([row.name for row in self.lists])

    def list_bytes(self, numel: int, shapes: Iterable[Shape] = (), ranks: int = 1) -> dict[str, int]:
        """List -> bytes of one rank's slice.

        numel: padding included.
        shapes: of tensors in all ranks' slices.
        """
        shapes = tuple(shapes)
        rows = sum(prod(shape[:-1]) for shape in shapes)
        columns = sum(prod(shape[:-2]) * prod(shape[-1:]) for shape in shapes)
        return {
            each.name: numel * each.per_element
            + -(-numel // self.block) * each.per_block
            + -(-(rows * each.per_row + columns * each.per_column) // ranks)
            for each in self.lists
        }

    def update_bytes(self, numel: int, shapes: Iterable[Shape] = (), ranks: int = 1) -> int:
        """Reads and writes ([Note: traffic]). Arguments as in `list_bytes`."""
        if self.traffic_per_param is not None:
            return numel * self.traffic_per_param
        return 2 * sum(self.list_bytes(numel, shapes, ranks).values()) + numel * _IN_AND_OUT


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Tensors whose name and shape satisfy `of` have their own states."""

    states: States
    of: Callable[[str, Shape], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """The states that the optimizer keeps for each trainable parameter.

    name: name of the optimizer, by which it has its `kinds`.
    state_bytes: list name -> bytes per parameter, in storage order, of a tensor that is of no kind. The default is
        AdamW with fp32 states; with the 2-byte working list it takes 14 bytes per parameter.
    dram_bytes_per_param: host memory traffic of one CPU update of such a tensor ([Note: traffic]).
    """

    name: str = "adamw"
    state_bytes: tuple[tuple[str, int], ...] = ((MASTER_LIST, 4), ("momentum", 4), ("variance", 4))
    dram_bytes_per_param: int = ADAM_BYTES_PER_PARAM

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """A tensor is of the first that takes it."""
        width = self.master_bytes
        return tuple(
            [replace(kind, states=_narrow(self.name, kind.states, width)) for kind in _KINDS.get(self.name, ())]
        )

    @property
    def all_states(self) -> tuple[States, ...]:
        """Of tensors of no kind, then of each kind."""
        lists = tuple([StateList(name=name, per_element=size) for name, size in self.state_bytes])
        plain = States(
            name=_REST.get(self.name, self.name),
            lists=lists,
            whole=self.name in _WHOLE,
            traffic_per_param=self.dram_bytes_per_param,
        )
        return (plain, *(kind.states for kind in self.kinds))

    @property
    def lists(self) -> tuple[str, ...]:
        """Of all tensors, in storage order."""
        return tuple(dict.fromkeys(name for states in self.all_states for name in states.names))

    @property
    def whole(self) -> bool:
        """Whether some tensors are updated whole."""
        return any(states.whole for states in self.all_states)

    @property
    def least_bytes_per_param(self) -> float:
        """Of the tensors that keep least, rows and columns left out."""
        return min(sum(row.per_element + row.per_block / s.block for row in s.lists) for s in self.all_states)

    def kind_of(self, name: str, shape: Shape) -> int:
        """Position in `all_states`."""
        return next((n for n, kind in enumerate(_KINDS.get(self.name, ()), 1) if kind.of(name, shape)), 0)

    @property
    def master_bytes(self) -> int:
        """4 for an optimizer of one's own that has none."""
        return dict(self.state_bytes).get(MASTER_LIST, 4)

    @property
    def masters(self) -> str:
        """One of MASTERS. An fp32 parameter is its own master."""
        return MASTERS[1] if self.master_bytes < 4 else MASTERS[0]

    def of_width(self, width: int) -> OptimizerSpec:
        """For a tensor of `width` bytes. One wider than the masters is its own: fp32 norms of a bf16 model."""
        return OPTIMIZERS[self.name] if width > self.master_bytes else self

    def states_by_dtype(self, dtypes: Iterable[str]) -> dict[str, tuple[States, ...]]:
        """dtype -> `all_states` of the optimizer of its tensors (`of_width`)."""
        return {name: self.of_width(STORAGE[name].bytes).all_states for name in set(dtypes)}

    @property
    def script(self) -> str:
        """What a script makes, in words."""
        made, optim = _SCRIPTS.get(self.name, (self.name, ""))
        return made + (f' (a Trainer: optim="{optim}")' if optim else "")

    @property
    def words(self) -> str:
        """For answers; "" for AdamW with fp32 states."""
        if self == OptimizerSpec():
            return ""
        return self.name if self.masters == MASTERS[0] else f"{self.name} without fp32 masters"

    def without_masters(self, width: int) -> OptimizerSpec:
        """For a model whose parameters have `width` bytes and no fp32 masters."""
        plain = _narrow(self.name, self.all_states[0], width)
        sizes = tuple([(row.name, row.per_element) for row in plain.lists])
        return replace(self, state_bytes=sizes, dram_bytes_per_param=_traffic(sizes))


def _narrow(name: str, states: States, width: int) -> States:
    """Beside a master of `width` bytes: torch's moments have the parameter's dtype where no master is wider."""
    follow = {MASTER_LIST} if name in _OWN_WIDTH else set(states.names)
    lists = [
        replace(r, per_element=min(r.per_element, width) if r.name in follow else r.per_element) for r in states.lists
    ]
    return replace(states, lists=tuple(lists))


def _traffic(state_bytes: Iterable[tuple[str, int]]) -> int:
    return 2 * sum(size for _, size in state_bytes) + _IN_AND_OUT


_EMBEDDING = re.compile(r"(^|[._])(embed(?!_out)\w*|\w*embeddings?|wte|wpe)([._]|$)|(^|\.)shared\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|classifier|score|qa_outputs)(\.|$)|^(model\.)?(head|output)\.weight$")


def _is_large(name: str, shape: Shape) -> bool:
    return prod(shape) >= _LEAST_8_BIT


def _is_no_embedding(name: str, shape: Shape) -> bool:
    """As in transformers' Trainer: embeddings keep 32 bits."""
    return _is_large(name, shape) and not _EMBEDDING.search(name)


def _is_matrix(name: str, shape: Shape) -> bool:
    """Muon's usual split: no embeddings, no head."""
    return len(shape) == 2 and not _EMBEDDING.search(name) and not is_head(name)


def is_head(parameter: str) -> bool:
    return _HEAD.search(parameter) is not None


def _has_columns(name: str, shape: Shape) -> bool:
    return len(shape) >= 2


def _newton_schulz(shape: Shape) -> Sequence[tuple[int, int, int, int]]:
    """A = X X^T, A A and (b A + c A A) X per iteration, for X [m, n] with m <= n."""
    m, n = sorted(shape)
    return _NS_STEPS * ((1, m, n, m), (1, m, m, m), (1, m, m, n))


def _elementwise(name: str, *moments: tuple[str, int]) -> OptimizerSpec:
    sizes = ((MASTER_LIST, 4), *moments)
    return OptimizerSpec(name=name, state_bytes=sizes, dram_bytes_per_param=_traffic(sizes))


def _states(name: str, *moments: StateList, **how: Any) -> States:
    return States(name=name, lists=(StateList(name=MASTER_LIST, per_element=4), *moments), **how)


def _in_8_bits(name: str, *moments: str) -> States:
    lists = [StateList(name=each, per_element=1, per_block=4) for each in moments]
    return _states(name, *lists, block=_BLOCK)


_FP32 = (("momentum", 4), ("variance", 4))
_MUON = _states("muon", StateList(name="momentum", per_element=4), whole=True, products=_newton_schulz)
_ADAMW_8_BIT = _in_8_bits("adamw-8bit", "momentum", "variance")
_LION_8_BIT = _in_8_bits("lion-8bit", "momentum")
_FACTORED = _states("adafactor", StateList(name="variance", per_row=4, per_column=4), whole=True)

OPTIMIZERS = {
    spec.name: spec
    for spec in (
        OptimizerSpec(),
        _elementwise("adamw-bf16-states", ("momentum", 2), ("variance", 2)),
        _elementwise("adamw-8bit", *_FP32),
        _elementwise("adamw-8bit-all", *_FP32),
        _elementwise("adamw-bnb", *_FP32),
        _elementwise("adam", *_FP32),
        _elementwise("lion", ("momentum", 4)),
        _elementwise("lion-8bit", ("momentum", 4)),
        _elementwise("lion-8bit-all", ("momentum", 4)),
        _elementwise("lion-bnb", ("momentum", 4)),
        _elementwise("adafactor", ("variance", 4)),
        _elementwise("muon", *_FP32),
        _elementwise("sgd-momentum", ("momentum", 4)),
        _elementwise("sgd"),
    )
}
_KINDS = {
    "adamw-8bit": (Kind(states=_ADAMW_8_BIT, of=_is_no_embedding),),
    "adamw-8bit-all": (Kind(states=_ADAMW_8_BIT, of=_is_large),),
    "lion-8bit": (Kind(states=_LION_8_BIT, of=_is_no_embedding),),
    "lion-8bit-all": (Kind(states=_LION_8_BIT, of=_is_large),),
    "adafactor": (Kind(states=_FACTORED, of=_has_columns),),
    "muon": (Kind(states=_MUON, of=_is_matrix),),
}
_REST = {
    "adamw-8bit": "adamw-bnb",
    "adamw-8bit-all": "adamw-bnb",
    "lion-8bit": "lion-bnb",
    "lion-8bit-all": "lion-bnb",
    "adafactor": "adafactor-vectors",
    "muon": "adamw",
}
"""Optimizer -> the rule that updates tensors of no kind."""
_WHOLE = ("adafactor",)
"""Optimizers that update tensors of no kind whole too."""
_OWN_WIDTH = ("adamw-8bit", "adamw-8bit-all", "adamw-bnb", "lion-8bit", "lion-8bit-all", "lion-bnb", "adafactor")
"""Optimizers whose moments keep their width beside a narrower parameter."""

_SCRIPTS = {
    "adamw": ("torch.optim.AdamW(fused=True)", "adamw_torch_fused"),
    "adamw-bf16-states": ("an AdamW with moments in bf16, which torch has not", ""),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit with embeddings in 32 bits", "adamw_bnb_8bit"),
    "adamw-8bit-all": ("bitsandbytes.optim.AdamW8bit", ""),
    "adamw-bnb": ("bitsandbytes.optim.AdamW", "paged_adamw_32bit"),
    "adam": ("torch.optim.Adam", ""),
    "lion": ("lion_pytorch.Lion", ""),
    "lion-8bit": ("bitsandbytes.optim.Lion8bit with embeddings in 32 bits", "lion_8bit"),
    "lion-8bit-all": ("bitsandbytes.optim.Lion8bit", ""),
    "lion-bnb": ("bitsandbytes.optim.Lion", "lion_32bit"),
    "adafactor": ("transformers.Adafactor", "adafactor"),
    "muon": ("torch.optim.Muon for matrices and torch.optim.AdamW for the rest", ""),
    "sgd-momentum": ("torch.optim.SGD(momentum=0.9)", ""),
    "sgd": ("torch.optim.SGD", "sgd"),
}
"""Optimizer -> what a script makes, and optim= of transformers' Trainer; "" where it has none."""

_BITSANDBYTES = {
    f"{paged}{kind}{bits}": f"{kind}-{states}"
    for kind in ("adamw", "lion")
    for paged in ("", "paged")
    for bits, states in (("", "bnb"), ("32bit", "bnb"), ("8bit", "8bit-all"))
}
"""Classes of bitsandbytes, in lower case, as a loop makes them."""
_LIBRARIES = ("torch", "transformers", "lion_pytorch", "deepspeed", "apex")
"""Those whose classes have names of `ALIASES` or `OPTIMIZERS`."""

ALIASES = {
    **_BITSANDBYTES,
    "adamw": "adamw",
    "lion": "lion",
    "fusedadam": "adamw",  # of DeepSpeed and apex, adam_w_mode by default
    "deepspeedcpuadam": "adamw",
    "fusedlion": "lion",
    "deepspeedcpulion": "lion",
    "adamw_bnb_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "paged_adamw_32bit": "adamw-bnb",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "paged_lion_8bit": "lion-8bit",
    "paged_lion_32bit": "lion-bnb",
    "lion_bnb_8bit": "lion-8bit",
    "lion_32bit": "lion-bnb",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "8bit-adamw": "adamw-8bit",
}
"""Names of frameworks and libraries, in lower case."""


def _name_here(name: str) -> str:
    library, _, word = name.lower().rpartition(".")
    library = library.partition(".")[0]
    if library in ("bnb", "bitsandbytes"):
        return _BITSANDBYTES.get(word, "")
    return ALIASES.get(word, word.replace("_", "-")) if library in ("", *_LIBRARIES) else ""


def optimizer_spec(name: str, *, masters: str | None = None, width: int = 4) -> OptimizerSpec:
    """By its name here, in a framework or a library.

    width: bytes of the model's parameters.

    Raises UnknownName.
    """
    text("optimizer", name, f"one of {', '.join(OPTIMIZERS)}")
    spec = OPTIMIZERS.get(_name_here(name))
    if spec is None:
        raise UnknownName("optimizer", name, tuple(OPTIMIZERS), meant(name) or "others are not modelled", guess=False)
    return spec.without_masters(width) if masters == MASTERS[1] else spec
