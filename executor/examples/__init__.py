"""Scripts to copy from: each is a user's own training program, run by the tests."""
