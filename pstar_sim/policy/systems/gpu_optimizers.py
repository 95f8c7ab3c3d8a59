"""Kernels of an optimizer that is whole on the GPU: of all parameters at once, in optimizer.step().

torch.optim.AdamW and Adam are "foreach" on CUDA unless they are made with fused=True. A foreach Adam takes the square
roots of all second moments before it uses the first (torch/optim/adam.py, _multi_tensor_adam: torch._foreach_sqrt of
exp_avg_sqs), so that a copy of this list is alive at the step, in one parameter group. A fused one works in place, as
do DeepSpeed's and Apex's; plans assume it. Only the memory of the copy is modelled, not the seconds of its kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.core.step import Place
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.kit.options import Option, one_of
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

__all__ = ["ADAM", "check_adam", "hold_copy"]

ADAM = Option(
    one_of("fused", "foreach"), "kernels of AdamW or Adam; foreach, torch's default, copies a moment", "fused"
)
_COPIED = "variance"
_FOREACH = ("adamw", "adamw-bf16-states", "adam")


def check_adam(adam: str, policy: str, workload: Workload, *, at_once: bool = False) -> bool:
    """Returns whether the kernels are foreach.

    at_once: each chunk is updated behind its last gradient.

    Raises CannotPlan for foreach where no such kernels update all parameters in one step.
    """
    if adam != "foreach":
        return False
    if (name := workload.optimizer.name) not in _FOREACH:
        raise CannotPlan(f"{policy}: adam=foreach is of {', '.join(_FOREACH)}, not of {name}; leave it out")
    if at_once:
        raise CannotPlan(
            f"{policy}: adam=foreach updates all parameters in optimizer.step(), not each behind its last gradient; "
            "leave it out, or plan with --update step"
        )
    return True


def hold_copy(b: Builder, visits: Sequence[Visit] = (), idle_bytes: int = 0) -> str:
    """Add the bytes by which the copy exceeds what else is free at the step. Returns words for `choices`.

    The bytes are held throughout the plan, whose peak they raise to that of the step.

    visits: chunks are whole during these, the gathers included, and gone at the step.
    idle_bytes: of buffers that are empty at the step.
    """
    layout = b.layout
    chunks = [c for c in range(len(layout.chunks)) if b.uses.updated(c) and _COPIED in layout.states_of(c).names]
    copied = sum(layout.payload_bytes(c, _COPIED) for c in chunks)
    tide = [m.peak_bytes for m in b.workload.moments]
    at_step = tide[-1]
    for v in visits:
        gathered = (
            0 if layout.chunks[v.chunk].small else layout.whole_bytes(v.chunk) - layout.payload_bytes(v.chunk, "param")
        )
        for m in range(v.first, v.last + 1):
            tide[m] += gathered
    beyond = copied - idle_bytes - (max(tide) - at_step)
    if beyond > 0:
        b.buffers.append(("a foreach AdamW's copy at the step, beyond the tide", Place.GPU, beyond))
    return f"; foreach, a copy of {format_bytes(copied)} at the step"
