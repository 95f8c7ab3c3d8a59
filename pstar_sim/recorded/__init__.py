"""What torch recorded of any framework's run: memory snapshots and profiler traces, read without torch."""
