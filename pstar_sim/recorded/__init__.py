"""What torch recorded of a user's own run, under whatever framework: memory snapshots and profiler traces, read without
torch."""
