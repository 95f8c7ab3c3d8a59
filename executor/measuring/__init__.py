"""Measurements of a run: bytes, moments, seconds; and rates of a machine that was not calibrated."""
