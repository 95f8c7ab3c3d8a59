"""The acts of the training loop, and `session.step(micro_batches)`, in which the engine calls the model's blocks
itself."""
