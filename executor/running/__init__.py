"""Parts of a job of `executor.run` beside the model: data, checkpoints, shared figures, the processor time of other
programs.
"""
