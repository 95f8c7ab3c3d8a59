"""The asynchronous family: the queues run independently, in the order that `choose` finds. kit/points.py lists its
points."""
