"""Off the plan: iterations without a plan, on-demand fetches, warm-up, and the ladder when memory runs out."""
