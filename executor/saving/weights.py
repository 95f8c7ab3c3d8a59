"""Streams weights from a folder straight into chunks.

Headers of safetensors are compared with a model before anything is allocated. Then each tensor is read
in pieces into one buffer and cast into every list that holds it, the fp32 master first. The model needs no memory:
build it under `parameters_on_meta()` (devices/on_meta.py). Host memory peaks at slabs, chunks, buffers, and one piece.

[Note: which value a master gets] Masters have the file's values, whatever its dtype, and the working copy is
cast(master): under a bf16 plan an fp32 file gives more precise masters.

[Note: adapters] A model under peft is loaded from its base model's folder, where names lack "base_model.model." and
".base_layer". Adapters have no file and keep their values; on meta (the base's device) they get peft's initial values.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.devices.torch_private import buffer_table, non_persistent_buffers
from executor.lifetime.loading import views_of
from executor.memory.arena import PLACES, Arena
from executor.memory.contents import Contents
from executor.saving.manifest import check_files, is_checkpoint, read_manifest
from executor.saving.tensor_files import StoredTensor, TensorFile, piece_buffer
from pstar_sim.dtypes import BASES, MASTER
from pstar_sim.errors import CheckpointError, WeightsError
from pstar_sim.units import format_params
from pstar_sim.workload.optimizers import MASTER_LIST
from pstar_sim.workload.workload import Tensor

log = logging.getLogger("executor")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMED_AT_MOST = 4
_READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_values(model: nn.Module, tensors: Sequence[Tensor], folder: str | Path | None) -> Weights | None:
    """The weights to load, matched with the model.

    Raises WeightsError if neither has values, or the folder is another model's."""
    if folder is not None:
        source = Weights(folder)
        source.check_checksums()
        source.match(model, tensors)
        _initialise_adapters(model)
        return source
    empty = [name for name, p in model.named_parameters() if p.is_meta]
    empty += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise WeightsError(
            f"{len(empty)} parameters and buffers of {type(model).__name__} are on the meta device, without values: "
            f"{some(empty)}; give prepare(..., weights=FOLDER), or build the model with values"
        )
    return None


def persistent_buffers(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Name in the state_dict -> (module, name in the module)."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in buffer_table(module).items():
            if buffer is not None and name not in non_persistent_buffers(module):
                found[f"{prefix}.{name}" if prefix else name] = (module, name)
    return found


def _initialise_adapters(model: Any) -> None:
    adapters: dict[str, Any] = getattr(model, "peft_config", {})
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "reset_lora_parameters")] if adapters else []
    for layer in layers:
        for name, config in adapters.items():
            parts = [part[name] for part in (layer.lora_A, layer.lora_B) if name in part]
            empty = [p for part in parts for p in part.parameters() if p.is_meta]
            for parameter in empty:
                real = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
            if empty:
                layer.reset_lora_parameters(name, config.init_lora_weights)


def _is_adapter(model: nn.Module, name: str) -> bool:
    return hasattr(model, "peft_config") and ".lora_" in name


def give_memory(parameters: Sequence[nn.Parameter], arena: Arena) -> None:
    """Parameters on meta become views of chunks on the gpu, the same objects for optimizers, ties and the user's
    lists."""
    for chunk in arena.layout.chunks:
        if not any(parameters[slot.tensor].is_meta for slot in chunk.slots):
            continue
        for slot, (view, *_) in views_of(arena, chunk, parameters):
            parameter = parameters[slot.tensor]
            # .data has a version counter of its own; else autograd would count copies into the chunk as writes
            twin = nn.Parameter(view.data, parameter.requires_grad)
            try:
                torch.utils.swap_tensors(parameter, twin)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise WeightsError(
                    f"parameter number {slot.tensor} (shape {list(parameter.shape)}) is on meta and something holds a "
                    f"weak reference to it, so that it cannot get memory ({error}); call prepare before that"
                ) from error


# -- a folder ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredValue:
    file: TensorFile
    name: str  # its name in the file

    @property
    def entry(self) -> StoredTensor:
        return self.file.entries[self.name]


@dataclass
class _FolderMatch:
    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    odd_shapes: list[str] = field(default_factory=list)
    odd_dtypes: list[str] = field(default_factory=list)


class Weights:
    """Reads headers only.

    folder: with model.safetensors, or shards and model.safetensors.index.json; or one .safetensors file.

    Raises WeightsError for files missing, truncated or of another format.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.note = ""
        self.largest_file_bytes = 0
        self._sources: dict[str, _StoredValue] = {}
        for path, listed in self._files().items():
            file = TensorFile(path)
            self.largest_file_bytes = max(self.largest_file_bytes, file.size_bytes)
            absent = [name for name in listed or () if name not in file.entries]
            if absent:
                raise WeightsError(
                    f"{self.folder / INDEX} says that {path.name} holds {some(absent)}, which it does not; the folder "
                    "mixes files of two models: copy it again"
                )
            for name in file.entries if listed is None else listed:
                self._sources[name] = _StoredValue(file, name)
        self._parameters: dict[int, _StoredValue] = {}
        self._buffers: list[tuple[nn.Module, str, _StoredValue]] = []

    @property
    def paths(self) -> frozenset[Path]:
        return frozenset(source.file.path for source in self._sources.values())

    def check_checksums(self) -> None:
        if is_checkpoint(self.folder):
            try:
                manifest = read_manifest(self.folder)
                check_files(self.folder, manifest, {path.name for path in self.paths} & manifest.files.keys())
            except CheckpointError as error:
                raise WeightsError(f"weights {str(self.folder)!r}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def _files(self) -> dict[Path, list[str] | None]:
        folder = self.folder
        if folder.is_file():
            return {folder: None}
        if not folder.is_dir():
            raise WeightsError(f"weights {str(folder)!r} is not a folder; give a folder with {SINGLE}, or {INDEX}")
        if (folder / SINGLE).exists():
            return {folder / SINGLE: None}
        if not (folder / INDEX).exists():
            other = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors"))
            also = (
                f"; it holds {', '.join(other[:NAMED_AT_MOST])}: save the model again with "
                "model.save_pretrained(FOLDER), which writes safetensors"
                if other
                else ""
            )
            raise WeightsError(f"weights {str(folder)!r} holds neither {SINGLE} nor {INDEX}{also}")
        try:
            table = json.loads((folder / INDEX).read_text())["weight_map"]
            files: dict[Path, list[str] | None] = {}
            for name, shard in table.items():
                listed = files.setdefault(folder / shard, [])
                assert listed is not None
                listed.append(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{folder / INDEX} is not an index of safetensors ({error}); copy it again") from error
        absent = sorted(path.name for path in files if not path.is_file())
        if absent:
            raise WeightsError(
                f"weights {str(folder)!r}: {len(absent)} of {len(files)} shards missing: {some(absent)}; copy the "
                "whole folder"
            )
        return files

    # -- of this model? -----------------------------------------------------------------------------------------------

    def match(self, model: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Find each parameter and buffer, by any of its tied names, with or without the base model's prefix, as in
        transformers. Raises WeightsError for what is missing, left over or of another shape.

        tensors: with tied names.
        """
        rename = self._renaming(model, [t.name for t in tensors])
        found = _FolderMatch()
        self._match_parameters(model, tensors, rename, found)
        self._match_buffers(model, rename, found)
        computed = {rename(name) for name, _ in model.named_buffers(remove_duplicate=False)} - found.used
        ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
        extra = sorted(
            name
            for name in self._sources.keys() - found.used - computed
            if not any(pattern.search(name) for pattern in ignored)
        )
        self._refuse(model, found.missing, extra, found.odd_shapes, found.odd_dtypes)
        self._refuse_meta_buffers(model, {id(buffer_table(module)[key]) for module, key, _ in self._buffers})
        self.note = self._describe(tensors)

    def _match_parameters(
        self, model: nn.Module, tensors: Sequence[Tensor], rename: Callable[[str], str], found: _FolderMatch
    ) -> None:
        names_of: dict[int, list[str]] = {}
        for index, t in enumerate(tensors):
            names_of.setdefault(index if t.tied_to is None else t.tied_to, []).append(rename(t.name))
        for index, names in names_of.items():
            found.used.update(names)
            source = next((self._sources[n] for n in names if n in self._sources), None)
            if source is None:
                if not (_is_adapter(model, tensors[index].name) or tensors[index].dtype in BASES):
                    found.missing.append(tensors[index].name)
                continue
            if source.entry.shape != tensors[index].shape:
                found.odd_shapes.append(_shapes(tensors[index].name, source.entry.shape, tensors[index].shape))
            elif source.entry.dtype not in _READABLE:
                found.odd_dtypes.append(f"{tensors[index].name} in {source.entry.code}")
            self._parameters[index] = source

    def _match_buffers(self, model: nn.Module, rename: Callable[[str], str], found: _FolderMatch) -> None:
        forgiven = _patterns(model, "_keys_to_ignore_on_load_missing")
        for name, (module, key) in persistent_buffers(model).items():
            source = self._sources.get(rename(name))
            buffer = buffer_table(module)[key]
            assert buffer is not None
            if source is None:
                if buffer.is_meta or not any(p.search(name) for p in forgiven):
                    found.missing.append(name)
                continue
            found.used.add(rename(name))
            if source.entry.shape != tuple(buffer.shape):
                found.odd_shapes.append(_shapes(name, source.entry.shape, tuple(buffer.shape)))
            self._buffers.append((module, key, source))

    def _renaming(self, model: nn.Module, names: Sequence[str]) -> Callable[[str], str]:
        ways: list[Callable[[str], str]] = [lambda name: name]
        if hasattr(model, "peft_config"):
            ways.append(lambda name: name.removeprefix("base_model.model.").replace(".base_layer.", "."))
        prefix = str(getattr(model, "base_model_prefix", "") or "")
        if prefix:
            ways += [lambda name: name.removeprefix(prefix + "."), lambda name: f"{prefix}.{name}"]
        return max(ways, key=lambda way: sum(way(name) in self._sources for name in names))

    def _refuse(
        self,
        model: nn.Module,
        missing: Sequence[str],
        extra: Sequence[str],
        odd_shapes: Sequence[str],
        odd_dtypes: Sequence[str],
    ) -> None:
        parts = [
            f"{len(names)} {what}: {some(names)}"
            for names, what in (
                (missing, "of the model's tensors missing"),
                (extra, "tensors that the model does not have"),
                (odd_shapes, "of another shape"),
                (odd_dtypes, "in a dtype that cannot be trained from (fp32, bf16, fp16 and fp64 can)"),
            )
            if names
        ]
        if parts:
            raise WeightsError(
                f"weights {str(self.folder)!r} are not those of this {type(model).__name__}: {'; '.join(parts)}; give "
                "the folder of this model, or build the model that the folder's config.json describes"
            )

    def _refuse_meta_buffers(self, model: nn.Module, held: set[int]) -> None:
        lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and id(buffer) not in held]
        if lost:
            raise WeightsError(
                f"{len(lost)} buffers are on the meta device and no file holds them: {some(lost)}; build the model "
                "under executor.parameters_on_meta(), which leaves buffers their memory, instead of "
                "torch.device('meta')"
            )

    def _describe(self, tensors: Sequence[Tensor]) -> str:
        counts: Counter[tuple[str, str, bool]] = Counter()
        for index, source in self._parameters.items():
            t = tensors[index]
            assert source.entry.dtype is not None
            counts[str(source.entry.dtype).removeprefix("torch."), t.dtype, t.frozen] += source.entry.numel
        parts = []
        for (stored, working, frozen), numel in counts.most_common():
            kept = f"working copies in {working}" if working != MASTER else "working copies the same"
            masters = "frozen, no masters" if frozen else "fp32 masters from the file's values"
            parts.append(f"{format_params(numel)} parameters stored in {stored}: {masters}, {kept}")
        return f"weights {self.folder}: " + "; ".join(parts)

    @property
    def tensors(self) -> Collection[int]:
        return self._parameters.keys()

    # -- reading ------------------------------------------------------------------------------------------------------

    def fill(self, arena: Arena, contents: Contents) -> None:
        """Into all lists with its value, in the order of files. Raises WeightsError where a file ends early or cannot
        be read."""
        self.fill_buffers()
        buffer = piece_buffer()
        chunk_of = arena.layout.chunk_of
        by_file: dict[Path, list[tuple[int, _StoredValue]]] = {}
        for index, source in self._parameters.items():
            by_file.setdefault(source.file.path, []).append((index, source))
        for rows in by_file.values():
            rows.sort(key=lambda row: row[1].entry.start)
            with rows[0][1].file.opened() as descriptor:
                for index, source in rows:
                    lists = [
                        (place, name)
                        for name in (MASTER_LIST, "param")
                        for place in PLACES
                        if arena.has(place, chunk_of[index], name)
                    ]
                    for first, piece in source.file.pieces(descriptor, source.name, buffer):
                        value = piece.float() if piece.dtype == torch.float64 else piece
                        for place, name in lists:
                            contents.slots.put(place, index, name, value, first)
        log.info("%s", self.note)

    def fill_buffers(self) -> None:
        for module, key, source in self._buffers:
            held = buffer_table(module)[key]
            assert held is not None
            value = source.file.read(source.name)
            if held.is_meta:
                buffer_table(module)[key] = value.to(held.dtype)
            else:
                held.copy_(value)


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    return [re.compile(pattern) for pattern in getattr(model, attribute, None) or ()]


def _shapes(name: str, stored: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{name} ({list(stored)} in the file, {list(wanted)} in the model)"


def some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_AT_MOST
    return ", ".join(names[:NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
