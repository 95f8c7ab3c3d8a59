"""What a run was really like: bytes, moments, seconds, and the workload recorded from a warm-up iteration."""
