"""ChunkState: which copies of a chunk's lists are current, and where its gradients are.

[Note: where a gradient is] A gradient that left autograd is in exactly one of the lists of its chunk, on the gpu or on
the host: in place in "param", in "grad" (on its way out) or in "grad32" (accumulated). `gradients` holds the tensor
indices by (place, list). The working list equals cast(param32), so a value that a gradient overwrote can be computed
again.

[Note: gradients in the master copy] Where the working list has the dtype of param32, an update would write each value
twice. If no step moves a list of the chunk, a gradient that goes to "param" is therefore written into the slot of
param32 on the gpu (`lent`). The value stays in the working list, and is updated there. The record reads as if the two
slots were exchanged; `Arena.at` and `Arena.free` exchange them (`ChunkGradients.settle`) before anyone else meets one
of the two lists. Where work is issued ahead, nothing is lent: no order would put an exchange before reads of other
queues.

[Note: between two lines] Ctrl-C may come between any two lines of this folder, and `zero_grad()` continues from the
ledger as it stands then (`off_plan/mending.py`). Therefore a slot enters `gradients`, and a copy ceases to be current,
before it is written over; a copy becomes current after it is written. Three changes cannot be so ordered and are
marked: an addition to a gradient (`adding`), the update (`updating`), and a list that has memory but no content yet
(`hollow`).

On several ranks these facts are about this rank's slice (`slices.py`). `whole` says that the other slices of the
working list are on the gpu too and current. A tensor index in `gradients` then stands for this rank's part of the
gradient, which may be empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pstar_sim.core.step import Place

__all__ = ["ChunkState"]


@dataclass
class ChunkState:
    """current: places whose copy of the working list holds the current values.
    ahead: lists newer on the gpu than on the host: updated states, and sums to which gradients were added.
    unsaved: lists newer on the host than on the disks: updated states.
    whole: whether the gpu has the other ranks' slices of the working list as well.

    lent: tensors whose slot of param32 on the gpu holds a gradient, new or spent.
    updated: elements at the front of the lists on the host that an update in parts has updated so far; 0 without one.
    update_in_parts: that update, until its last part.
    arrived: elements at the front of the working list on the gpu that a copy in parts has brought so far.
    """

    current: set[Place] = field(default_factory=set)
    ahead: set[str] = field(default_factory=set)
    unsaved: set[str] = field(default_factory=set)
    whole: bool = False
    adding: bool = False
    updating: bool = False
    hollow: set[tuple[Place, str]] = field(default_factory=set)
    gradients: dict[tuple[Place, str], set[int]] = field(default_factory=dict)
    lent: set[int] = field(default_factory=set)
    updated: int = 0
    update_in_parts: object = None
    arrived: int = 0

    def where(self, place: Place, list_name: str) -> set[int]:
        return self.gradients.setdefault((place, list_name), set())

    def with_gradient(self) -> set[int]:
        return set().union(*self.gradients.values())
