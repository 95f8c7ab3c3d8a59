"""The running queues of a plan: `interface.py`, and three kinds of them: threads, streams, one step at a time."""
