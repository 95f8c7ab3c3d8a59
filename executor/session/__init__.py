"""A session's parts: what a plan says by moment, and what of it has happened."""
