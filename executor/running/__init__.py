"""Parts of a job of `executor.run` beside the model: its data, its checkpoints, the figures that several ranks share,
and the processor time of other programs.
"""
