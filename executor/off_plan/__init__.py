"""Iterations without a plan, or off the plan: on-demand fetches, warm-up, and the ladder when memory runs out."""
