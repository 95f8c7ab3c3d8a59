"""Operators whose fake version has less memory than the real one.

A smaller fake result makes a captured tide too low. `SEEN_SMALLER` lists such operators of torch 2.13, of 578 compared
(torch's operator samples, forward and backward, and common modules); all others were equal to the byte. A listed
operator runs once for each shape on zeros, for its results' sizes. Those too large for that, or not torch's own, are
named in the trace's notes. `mkldnn_rnn_layer_backward` is left alone, though its real version has one bias more: it
would read a workspace of zeros.

No capture sees workspaces, memory that is not torch's, or another device's kernels, so a run's first iteration is
compared with its trace (`measuring/first.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from executor.devices.torch_private import EMBEDDING_BAG, storage_key
from executor.moments.unseen import unseen
from pstar_sim.units import format_bytes

aten = torch.ops.aten

SEEN_SMALLER: dict[Any, str] = {
    aten.mkldnn_rnn_layer.default: "keeps a workspace for its backward (LSTM in fp32 on a CPU)",
    aten.col2im.default: "shrinks its result from a padded one (fold)",
    EMBEDDING_BAG.default: "has an end offset more",
    aten.mse_loss.default: "keeps the memory of the loss before its mean",
    aten.smooth_l1_loss.default: "keeps the memory of the loss before its mean",
    aten.soft_margin_loss.default: "keeps the memory of the loss before its mean",
    aten.binary_cross_entropy.default: "keeps the memory of the loss before its mean",
}
OWN = frozenset(("aten", "prim", "prims"))  # namespaces of torch's operators
MOST_BYTES = 1 << 30  # largest bytes of an operator's arguments with which it is run


class Blind:
    """notes: sentences on blind operators for the trace."""

    def __init__(self) -> None:
        self._forms: dict[Any, tuple[_Form | None, ...]] = {}  # (operator, forms of its arguments) -> results
        self._measured: set[str] = set()
        self._unmeasured: set[str] = set()
        self._foreign: set[str] = set()

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """Returns `out` with storages of the real result's sizes."""
        if func not in SEEN_SMALLER:
            if func.namespace not in OWN:
                self._foreign.add(str(func.name()))
            return out
        size_bytes = sum(t.untyped_storage().nbytes() for t in _tensors((args, kwargs)))
        if size_bytes > MOST_BYTES:
            self._unmeasured.add(f"{func} ({format_bytes(size_bytes)} of arguments)")
            return out
        self._measured.add(str(func))
        key = (func, tuple(_form(leaf) for leaf in tree_leaves((args, kwargs))))
        if key not in self._forms:
            self._forms[key] = _real(func, args, kwargs)
        return _as_real(out, self._forms[key])

    @property
    def notes(self) -> str:
        said = [
            ("run on zeros for the size of their results: ", self._measured),
            ("blind: not run for the size of their results: ", self._unmeasured),
            ("blind: not torch's own, sizes as their fake versions say: ", self._foreign),
        ]
        return "; ".join(words + ", ".join(sorted(names)) for words, names in said if names)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _form(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape), leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf


class _Form(NamedTuple):
    storage: int
    size_bytes: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def _real(func: Any, args: Any, kwargs: Any) -> tuple[_Form | None, ...]:
    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu").zero_()

    with unseen():  # in the caller's grad mode: some operators keep memory only for a backward
        out = [
            leaf if isinstance(leaf, torch.Tensor) else None
            for leaf in tree_leaves(func(*tree_map(zeros, args), **tree_map(zeros, kwargs)))
        ]
    storages = [None if leaf is None else leaf.untyped_storage() for leaf in out]
    keys = [None if storage is None else storage_key(storage) for storage in storages]
    return tuple(
        None if t is None or s is None else _Form(keys.index(storage_key(s)), s.nbytes(), tuple(t.shape), t.stride())
        for t, s in zip(out, storages)
    )


def _as_real(out: Any, real: tuple[_Form | None, ...]) -> Any:
    """Storages are shared only where the real ones are."""
    of: dict[int, int] = {}  # fake storage -> index of the real storage
    leaves, spec = tree_flatten(out)
    for i, (leaf, form) in enumerate(zip(leaves, real)):
        if form is None or not isinstance(leaf, torch.Tensor):
            continue
        storage = leaf.untyped_storage()
        alone = of.setdefault(storage_key(storage), form.storage) == form.storage
        if not alone or storage.nbytes() < form.size_bytes or tuple(leaf.shape) != form.size:
            base = torch.empty(-(-form.size_bytes // leaf.element_size()), dtype=leaf.dtype, device="cpu")
            leaves[i] = base.as_strided(form.size, form.stride)
    return tree_unflatten(leaves, spec)
