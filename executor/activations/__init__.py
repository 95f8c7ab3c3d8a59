"""Activations: the plan's choice per block (keep, recompute, offload), and copies of offloaded ones."""
