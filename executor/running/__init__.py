"""Parts of `executor.run` beside the model: data, checkpoints, shared figures, other programs' processor time."""
