"""`session.step(micro_batches)`: the engine calls the model's blocks itself, in the order of the plan."""
