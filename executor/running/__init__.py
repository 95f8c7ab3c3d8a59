"""Parts of a job of `executor.run` beside the model: its data, its checkpoints, what several ranks share, and how much
processor time other programs took.
"""
