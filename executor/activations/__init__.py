"""The plan's choice per block (keep, recompute, offload), and the offloaded activations' way to the host and back."""
