"""What a run was really like: bytes, moments, seconds; and what the machine does where no one has calibrated it."""
