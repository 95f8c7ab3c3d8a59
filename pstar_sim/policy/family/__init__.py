"""The asynchronous family: the queues of its plans run independently, in the order that `choose` finds."""
