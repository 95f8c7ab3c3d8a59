"""An optimizer's kernels on the GPU, for all parameters at once, in optimizer.step().

torch's AdamW and Adam are "foreach" on CUDA without fused=True: square roots of all second moments come before the
first use (torch/optim/adam.py, _multi_tensor_adam: torch._foreach_sqrt of exp_avg_sqs), so a copy of this list is
alive, in one parameter group. A loop over parameters (foreach=False, transformers' AdamW) copies one tensor at a time.
Both have a kernel per operation over whole tensors, three times as long (`cost.UNFUSED_TRAFFIC`). Fused ones,
DeepSpeed's and Apex's work in place, as plans assume.
"""

from __future__ import annotations

from collections.abc import Sequence

from pstar_sim.core.step import UNFUSED, Place
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.kit.options import Option, one_of
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.units import format_bytes
from pstar_sim.workload.workload import Workload

ADAM = Option(
    one_of("fused", "foreach", "loop"), "kernels of AdamW or Adam; foreach, torch's default, copies a moment", "fused"
)
_COPIED = "variance"
_HAVE_KERNELS = ("adamw", "adamw-bf16-states", "adam")


def check_adam(adam: str, policy: str, workload: Workload, *, at_once: bool = False) -> str | None:
    """Returns `Step.via` of the updates.

    at_once: each behind its last gradient.

    Raises CannotPlan where unfused kernels do not update all parameters in one step.
    """
    if adam == "fused":
        return None
    if (name := workload.optimizer.name) not in _HAVE_KERNELS:
        raise CannotPlan(f"{policy}: adam={adam} is of {', '.join(_HAVE_KERNELS)}, not of {name}; leave it out")
    if at_once:
        raise CannotPlan(
            f"{policy}: adam={adam} updates all parameters in optimizer.step(), not each behind its last gradient; "
            "leave it out, or plan with --update step"
        )
    return UNFUSED


def hold_copy(b: Builder, adam: str, visits: Sequence[Visit] = (), idle_bytes: int = 0) -> str:
    """The bytes by which a foreach optimizer's copy exceeds what else is free at the step, held throughout; returns
    words for `choices`.

    visits: of whole chunks, gathers included, gone at the step.
    idle_bytes: of empty buffers then.
    """
    if adam != "foreach":
        return "; tensor by tensor" if adam == "loop" else ""
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
