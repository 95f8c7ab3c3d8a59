"""Draft: what policies write before a plan is chosen. A row has no bytes and no edges; steps are made of it once."""

from __future__ import annotations

from dataclasses import dataclass

from pstar_sim.core.step import Kind

__all__ = ["Row"]


@dataclass(slots=True)
class Row:
    """One step, or a block of moments (`block`, on the compute queue). -1: none. moment: as of the step; that of an
    Adam or of a stash is known without. list_name: of what has one."""

    kind: Kind
    chunk: int = -1
    list_name: str = "param"
    moment: int = -1
    block: int = -1
    stash: int = -1
