"""When there is no plan or reality differs from it: on-demand fetches, warm-up, and the ladder when memory runs out."""
