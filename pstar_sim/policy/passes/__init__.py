"""Passes: from the decisions of a policy to the steps of a plan. Each concern of an iteration is a pass of its own
(draft_rows.py says what a pass is, lowering.py in which order they come); edges come last. The builder is for policies
that write their steps one by one."""
