"""Activations: the plan's choice per block (keep, recompute, offload), and the copies of offloaded activations to the
host and back."""
