"""Examples: scripts to copy from. Each is a user's training program, run by the tests."""
