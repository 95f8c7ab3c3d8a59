"""Passes: from the decisions of a policy to the steps of a plan, each for one concern of an iteration. draft_rows.py
defines a pass, and lowering.py gives their order; edges come last. The builder serves policies that write their steps
one by one."""
