"""The independent checker: proves that every legal interleaving of a plan's steps is correct and within budget.

It shares no code with the policies, the ledger or core/effects.py, so an error there is not repeated.

The proof unrolls two successive iterations. [Note: what precedes what] Each queue runs in order, so the steps that must
have ended before a step starts are one number per queue: vector clocks, exact, from queue order and `after` in one
pass. If they order any two steps of which one changes a list that both touch, every legal interleaving computes the
same values, and playing the plan once shows whether each step finds its lists with the right contents. Bytes depend on
the interleaving: the most in a place is a maximum closure over start events (which take) and end events (which free),
found exactly as a minimum cut.

[Note: one rank is enough] All ranks run the same program, so the n-th collective is the same step on every rank. A
proof for one rank then holds for all, whatever the collectives take, and they cannot wait in a circle. A gather brings
other ranks' slices in the state of this rank's at the same step. A gradient is whole only after a reduce_scatter has
summed it over the ranks.
"""
