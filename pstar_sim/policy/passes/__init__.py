"""From a policy's decisions to a plan's steps, a pass per concern of an iteration. draft_rows.py defines a pass,
lowering.py their order; edges come last. The builder is for policies that write steps one by one."""
