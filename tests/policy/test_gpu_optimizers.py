"""A foreach AdamW's copy of a moment at the step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pstar_sim.core.plan import Plan, Settings
from pstar_sim.errors import CannotPlan
from pstar_sim.policy.registry import find_policy
from pstar_sim.sim.play import play
from pstar_sim.testing import chain_workload, round_machine
from pstar_sim.workload.optimizers import OPTIMIZERS
from pstar_sim.workload.workload import Workload, with_optimizer

PARAMS = 4 * 2**20  # of four layers


def job(tide_bytes: int) -> Workload:
    w = chain_workload(4, 2**20)
    peaks = [tide_bytes] * (len(w.moments) - 1) + [0]
    moments = [replace(m, start_bytes=0, end_bytes=0, peak_bytes=peak) for m, peak in zip(w.moments, peaks)]
    return replace(w, moments=tuple(moments))


def planned(policy: str, tide_bytes: int, *, ranks: int = 1, **settings: object) -> Plan:
    plan = find_policy(policy)(job(tide_bytes), round_machine(ranks=ranks), Settings(**settings))
    plan.check()
    return plan


def peak(plan: Plan) -> int:
    return play(plan).peak_bytes["gpu"]


@pytest.mark.parametrize("tide_bytes", [0, PARAMS, 4 * PARAMS, 6 * PARAMS])
def test_the_copy_takes_the_place_of_the_tide(tide_bytes: int) -> None:
    """14 bytes per parameter, and at the step 4 more; before it, the tide."""
    assert peak(planned("all_on_gpu", tide_bytes)) == 14 * PARAMS + tide_bytes
    assert peak(planned("all_on_gpu:adam=foreach", tide_bytes)) == 14 * PARAMS + max(tide_bytes, 4 * PARAMS)


def test_of_sharded_ranks_each_copies_its_own_slices_when_no_block_is_whole() -> None:
    """A rank of 4 with layers of P parameters has 18 P of slices, and 2 P for the gradients of a block. Before the step
    two blocks are whole, 2 x 2 P x 3 / 4; at the step the copy of 4 P takes the place of both: 22 P, not 23."""
    fused, foreach = (planned(f"zero3_resident{option}", 0, ranks=4) for option in ("", ":adam=foreach"))
    assert peak(fused) == peak(foreach) == 23 * PARAMS // 4
    assert "foreach, a copy of 4.194 MB at the step" in str(foreach.choices["adam"])


def test_a_loop_copies_no_list() -> None:
    assert peak(planned("all_on_gpu:adam=loop", PARAMS)) == peak(planned("all_on_gpu", PARAMS))


@pytest.mark.parametrize("adam", ["foreach", "loop"])
@pytest.mark.parametrize("policy", ["all_on_gpu", "zero3_resident"])
def test_kernels_of_one_operation_each_take_three_times_as_long(policy: str, adam: str) -> None:
    """Four layers of 2**20 parameters, whose fused update takes a second each."""
    fused, unfused = (play(planned(f"{policy}{option}", 0)).iteration_s for option in ("", f":adam={adam}"))
    assert unfused - fused == pytest.approx(2 * 4)


def test_an_update_behind_each_gradient_copies_no_list_of_all() -> None:
    assert not planned("all_on_gpu", 0, update="eager", clip=False).buffers
    with pytest.raises(CannotPlan, match=r"adam=foreach updates all parameters in optimizer.step\(\), not each behind"):
        planned("all_on_gpu:adam=foreach", 0, update="eager", clip=False)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["all_on_gpu", "zero3_resident"])
def test_only_adam_is_foreach(policy: str, name: str) -> None:
    w, machine = with_optimizer(job(0), name), round_machine()
    plans = find_policy(f"{policy}:adam=foreach")
    if name in ("adamw", "adamw-bf16-states", "adam"):
        assert "foreach" in str(plans(w, machine, Settings()).choices["adam"])
        return
    with pytest.raises(CannotPlan, match=f"{policy}: adam=foreach is of adamw, adamw-bf16-states, adam, not of {name}"):
        plans(w, machine, Settings())
