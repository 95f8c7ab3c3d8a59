"""The asynchronous family: every queue goes its own way, in the order that `choose` finds; kit/points.py says where."""
