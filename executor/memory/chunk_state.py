"""ChunkState: which copies of a chunk's lists are current, and where its gradients are.

[Note: where a gradient is] A gradient that left autograd is in exactly one list of its chunk, on the gpu or on the
host: in place in "param", in "grad" (on its way out) or in "grad32" (accumulated). `gradients` holds tensor indices by
(place, list). The working list equals cast(param32), so a value that a gradient overwrote can be computed again.

[Note: gradients in the master copy] Where the working list has param32's dtype, an update would write each value twice.
So if no step moves a list of the chunk, a gradient for "param" is written into param32's slot on the gpu (`lent`), and
the value is updated in the working list. The record reads as if the slots were exchanged; `Arena.at` and `Arena.free`
exchange them (`ChunkGradients.settle`) before anyone else meets a list. Where work is issued ahead, nothing is lent: no
order would put an exchange before reads of other queues.

[Note: between two lines] Ctrl-C may come between any two lines of this folder, and `zero_grad()` continues from the
ledger as it is then (`off_plan/mending.py`). So a slot enters `gradients`, and a copy ceases to be current, before it
is written over; a copy becomes current after it is written. Changes that cannot be so ordered are marked: an addition
to a gradient (`adding`), the update (`updating`), and a list with memory but no content yet (`hollow`).

On several ranks this is about this rank's slice (`slices.py`): `whole` says that the gpu has the working list's other
slices too, current; an index in `gradients` stands for this rank's part, which may be empty.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pstar_sim.core.step import Place


@dataclass
class ChunkState:
    """current: places whose working list holds the current values.
    ahead: lists newer on the gpu than on the host: updated states, added sums.
    unsaved: updated states newer on the host than on disks.
    whole: the gpu has the other ranks' slices of the working list too.

    lent: tensors whose slot of param32 on the gpu holds a gradient, new or spent.
    updated: elements that an update in parts has updated on the host, 0 without one.
    update_in_parts: until its last part.
    arrived: elements that a copy in parts has brought to the working list on the gpu.
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
