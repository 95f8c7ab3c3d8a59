"""Folders of weights and checkpoints: written whole or not at all, read into chunks without a second copy of
the model.
"""
