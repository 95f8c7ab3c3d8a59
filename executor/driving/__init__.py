"""The acts of the training loop, and `session.step(micro_batches)`, where the engine calls the model's blocks."""
