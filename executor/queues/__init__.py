"""The running queues of a plan: `interface.py`, and three kinds of them: threads, streams, one step at a time.

`logs.py` and `moved.py` keep the logs of the queues; `measured_timeline.py` makes a Timeline of them.
"""
