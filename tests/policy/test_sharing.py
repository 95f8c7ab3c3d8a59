"""Plans that several ask for are made once, and kept no longer than they are shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pstar_sim as ps
from pstar_sim.core.follow import RECORDS, Member, follow_once
from pstar_sim.core.plan import ANY_PLAN, Plan, Settings
from pstar_sim.core.program import Program
from pstar_sim.core.workspace import with_host_budget, without_workspace, workspace_bytes
from pstar_sim.cost import cost_of
from pstar_sim.errors import DoesNotFit
from pstar_sim.policy.family.pace import period_s
from pstar_sim.policy.kit.sharing import once_for_steps, plan_once, plans_shared
from pstar_sim.policy.registry import find_policy

EAGER = Settings(update="eager", clip=False, effort=0.2)


def test_inside_a_plan_is_made_once_and_outside_always_anew() -> None:
    workload, machine = ps.preset("1B", batch=2, seq=256), ps.machine("rtx4090")
    tide, patrickstar = find_policy("tide"), find_policy("patrickstar")
    with plans_shared(workload):
        first = plan_once(tide, workload, machine, EAGER)
        assert plan_once(tide, workload, machine, EAGER) is first
        assert plan_once(patrickstar, workload, machine, EAGER).policy == "patrickstar"
        assert plan_once(tide, workload, machine, Settings()).settings == Settings()
        assert plan_once(tide, workload, replace(machine), EAGER) is first
        slower = replace(machine, host=replace(machine.host, cores=1))
        for other in (with_host_budget(machine, machine.host_budget_bytes // 2), slower):
            assert plan_once(tide, workload, other, EAGER).machine is other
    again = plan_once(tide, workload, machine, EAGER)
    assert again is not first
    assert again.steps == first.steps


def test_inside_a_plan_is_followed_once_by_whoever_asks_unless_its_seconds_change() -> None:
    workload, machine = ps.preset("1B", batch=2, seq=256), ps.machine("rtx4090")
    with plans_shared(workload):
        plan = plan_once(find_policy("tide"), workload, machine, EAGER)
        cost = cost_of(workload, machine, plan.layout)
        member = Member(Program.of(plan), cost.step_costs(plan), cost.rates())
        first = follow_once(plan, member)
        assert period_s(replace(plan, host_budget_bytes=plan.host_budget_bytes + 1)) == first.iteration_s
        assert follow_once(plan, member) is first
        link = replace(machine.link, h2d_bytes_per_s=machine.link.h2d_bytes_per_s / 2)
        slower = replace(machine, ranks=(replace(machine.ranks[0], link=link),))
        assert period_s(replace(plan, machine=slower)) > first.iteration_s
    assert follow_once(plan, member) is not first


@pytest.mark.parametrize("policy", ["static_partition", "optimal"])
def test_a_plan_is_followed_unless_any_will_do(policy: str) -> None:
    workload, machine = ps.preset("gpt2", batch=2, seq=256), ps.machine("virtual", gpu_memory="700MB")
    for effort in (ANY_PLAN, EAGER.effort):
        with plans_shared(workload):
            plan_once(find_policy(policy), workload, machine, replace(EAGER, effort=effort))
            assert bool(workload.derived[RECORDS]) == (effort > ANY_PLAN)


def test_what_steps_need_is_asked_once_wherever_the_plan_moves() -> None:
    workload, machine = ps.preset("1B", batch=2, seq=256), ps.machine("rtx4090")
    asked = list[Plan]()

    def steps_of(plan: Plan) -> int:
        asked.append(plan)
        return len(plan.steps)

    with plans_shared(workload):
        plan = plan_once(find_policy("tide"), workload, machine, EAGER)
        moved = replace(plan, host_budget_bytes=plan.host_budget_bytes + 1)
        assert once_for_steps(plan, steps_of) == once_for_steps(moved, steps_of) == len(plan.steps)
        assert asked == [plan]
        other = plan_once(find_policy("patrickstar"), workload, machine, EAGER)
        assert once_for_steps(other, steps_of) == len(other.steps)
    once_for_steps(plan, steps_of)
    assert asked == [plan, other, plan]


def test_who_shares_first_shares_longest() -> None:
    workload, machine = ps.preset("1B", batch=2, seq=256), ps.machine("rtx4090")
    tide = find_policy("tide")
    with plans_shared(workload):
        first = plan_once(tide, workload, machine, EAGER)
        with plans_shared(workload, workload):
            assert plan_once(tide, workload, machine, EAGER) is first
        assert plan_once(tide, workload, machine, EAGER) is first


def test_what_does_not_fit_is_refused_each_time_and_planned_once() -> None:
    workload, machine = ps.preset("1B", batch=2, seq=256), ps.machine("rtx4090", gpu_memory="2GB")
    calls: list[ps.Machine] = []

    def all_on_gpu(w: ps.Workload, m: ps.Machine, s: Settings) -> Plan:
        calls.append(m)
        return find_policy("all_on_gpu")(w, m, s)

    with plans_shared(workload):
        frames = set()
        for _ in range(3):
            with pytest.raises(DoesNotFit) as refused:
                plan_once(all_on_gpu, workload, machine, EAGER)
            frames.add(len(refused.traceback))
        assert len(calls) == len(frames) == 1
        larger = with_host_budget(machine, 2 * machine.host_budget_bytes)
        with pytest.raises(DoesNotFit):
            plan_once(all_on_gpu, workload, larger, EAGER)
    assert calls == [machine, larger]


def test_what_a_run_on_disks_leaves_of_a_host_is_one_object_whatever_is_asked_in_between() -> None:
    workload, machine = ps.preset("gpt2", batch=2, seq=64), ps.machine("a100-80x8", gpus=2)
    first = without_workspace(workload, machine)
    other = without_workspace(workload, replace(machine))
    assert without_workspace(workload, machine) is first is not other
    assert first == other and first.host_budget_bytes == machine.host_budget_bytes - workspace_bytes(workload)


@pytest.mark.parametrize("name", [pytest.param("rtx4090", marks=pytest.mark.whole), "a100-80x8"])
def test_a_comparison_times_each_plan_once_and_shows_the_policies_in_the_order_asked_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a machine with disks too, where a plan is made for a part of the host, and moved."""
    workload, machine = ps.preset("1B", batch=2, seq=256), ps.machine(name, gpus=1, gpu_memory="6GB")
    timed: dict[str, float] = {}

    def timing(plan: Plan) -> float:
        timed[plan.policy] = period_s(plan)
        return timed[plan.policy]

    monkeypatch.setattr("pstar_sim.policy.optimal.period_s", timing)
    names = ["optimal", "deep_optimizer_states", "patrickstar"]
    ps.compare(workload, machine, policies=names[:1], settings=EAGER)
    assert timed.pop(names[1])
    shared = ps.compare(workload, machine, policies=names, settings=EAGER)
    assert [row.policy for row in shared.rows] == list(shared.planned) == names
    assert not {*names} & {*timed}
    for policy in names:
        assert shared[policy].row.iteration_s == period_s(shared[policy].plan)


def test_a_comparison_finds_what_each_policy_finds_alone_and_keeps_no_plans() -> None:
    workload, machine = ps.preset("gpt2", batch=2, seq=256), ps.machine("rtx4090", gpu_memory="2GB")
    names = ["tide", "optimal", "zero3_offload"]
    shared = ps.compare(workload, machine, policies=names, settings=EAGER)
    assert ("plans",) not in workload.derived
    for name in names:
        alone: Plan = find_policy(name)(ps.preset("gpt2", batch=2, seq=256), machine, EAGER)
        found = shared[name].plan
        assert (found.steps, found.choices, found.predictions) == (alone.steps, alone.choices, alone.predictions)
