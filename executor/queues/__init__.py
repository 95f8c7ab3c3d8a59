"""The queues of a plan in motion: `interface.py`, and three kinds of them: threads, streams, one step at a time."""
