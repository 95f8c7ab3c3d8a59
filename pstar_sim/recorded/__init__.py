"""What torch recorded of a user's own run, under whatever framework: memory snapshots and profiler traces. Reads files,
without torch; sets them beside plans; writes snapshots of plans for torch's memory_viz."""
