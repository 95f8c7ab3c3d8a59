"""Passes: what steps need whatever the policy: the copies of stashes, and the memory edges, which come last."""
