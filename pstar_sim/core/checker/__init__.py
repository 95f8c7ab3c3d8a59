"""The independent checker: proves that every legal interleaving of a plan's steps is correct and within budget.

Shares no code with the policies or with core/effects.py, so that an error in one is not repeated in the other.

How. Two successive iterations are unrolled. [Note: what precedes what] Each queue runs its steps in order, so all
that must have ended before a step starts is one number a queue: how many of its steps. These vectors (vector clocks)
follow from queue order and `after` in one pass and are exact. If any two steps that touch the same list of the same
chunk, one of them changing it, are ordered by them, then every legal interleaving computes the same, and playing the
plan once, in any legal order, shows whether what each step needs is there and what it says. Bytes do depend on the
interleaving: the most a place can hold is a maximum closure over the start events (which take) and end events (which
free), found exactly as a minimum cut.

[Note: one rank is enough] All ranks run the same program, so the n-th collective is the same step everywhere, and each
rank's waits are in the order of one and the same program: what is proved of one rank holds for all, with any durations
of the collectives, and they cannot wait for each other in a circle. A gather makes the others' slices what the own one
is at the same step of their run; a gradient counts as whole only after a reduce_scatter has summed it over the ranks.
"""
