"""Measurements of a run: bytes, moments, seconds."""
