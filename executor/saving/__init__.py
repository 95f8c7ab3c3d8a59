"""Folders of weights and checkpoints, written atomically, read into chunks without a second copy of the model."""
