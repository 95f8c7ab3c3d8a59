"""Policies: pure functions (workload, machine, settings) -> plan, with the parts that they share."""

from pstar_sim.policy.family.plan_visits import plan_visits
from pstar_sim.policy.kit.job import Job
from pstar_sim.policy.kit.visits import Visit
from pstar_sim.policy.passes.builder import Builder
from pstar_sim.policy.registry import Policy, find_policy, policies

__all__ = ["Builder", "Job", "Policy", "Visit", "find_policy", "plan_visits", "policies"]
