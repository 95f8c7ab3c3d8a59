"""Chunks and steps in pictures, by a plan's layers, lists and parts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from pstar_sim.core.plan import Plan

_USUAL = (None, "param", "grad")


def chunk_words(plan: Plan | None) -> Mapping[int, str]:
    """Step -> "chunk 3 (h.1.mlp)", "chunk 3 (h.1.mlp), momentum" or "chunk 3 (h.1.mlp), part 2 of 8", empty without a
    plan."""
    if plan is None:
        return {}
    layers = layer_names(plan)
    words: dict[int, str] = {}
    for step in plan.steps:
        if step.chunk is not None:
            listed = "" if step.list in _USUAL else f", {step.list}"
            part = "" if step.part is None else f", part {step.part.number + 1} of {step.part.of}"
            words[step.id] = f"chunk {step.chunk} ({layers[step.chunk]}){listed}{part}"
    return words


def layer_names(plan: Plan) -> tuple[str, ...]:
    """The module with all of a chunk's parameters, "h.0 to h.1" for neighbours, or how many small tensors."""
    names = []
    for chunk in plan.layout.chunks:
        tensors = [plan.workload.tensors[slot.tensor].name for slot in chunk.slots]
        modules = [(name.rpartition(".")[0] or name).split(".") for name in tensors]
        common = [parts[0] for parts in takewhile(lambda parts: len({*parts}) == 1, zip(*modules))]
        if chunk.small and len(tensors) > 1:
            names.append(f"{len(tensors)} small tensors")
        elif len(modules) > 1 and not any(part.isdigit() for part in common):
            names.append(" to ".join(dict.fromkeys(".".join(_block(module)) for module in (modules[0], modules[-1]))))
        else:
            names.append(".".join(common))
    return tuple(names)


def block_name(layer: str) -> str:
    """The last two parts of its name: "layers.3"."""
    return ".".join(_block(layer.partition(" to ")[0].split("."))[-2:])


def _block(module: list[str]) -> list[str]:
    numbers = [n for n, part in enumerate(module) if part.isdigit()]
    return module[: numbers[-1] + 1] if numbers else module
