"""Five scripts as users have them, unchanged, run offloaded: against the written-out reference, and against themselves."""

LOSS = 0.01
"""Largest distance, relative, of a step's loss from that of the script's own autocast run. Fixed before the first run:
bf16 rounds by 2**-9, a forward has some thirty roundings one after the other, and a loss is a mean over many tokens."""
PATH = 0.5
"""Largest distance of the parameters from those of the script's own autocast run, as a share of the way that the run
has come from its initial values. Fixed before the first run: AdamW divides each gradient by its own size, so where
rounding turns the sign of a small gradient the whole update of that element differs; of 3 % of all elements that is
sqrt(0.03 * 4) = 0.35 of the way."""
