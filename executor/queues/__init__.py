"""The queues of a plan in motion: `interface.py`, and three kinds of them: threads, streams, one step at a time.

What they did is written down in `logs.py` and `moved.py`; `timeline.py` makes a Timeline of it.
"""
