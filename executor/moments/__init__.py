"""Moments of the user's model: hooks for its events, a count of its operators, and the recorder that makes a workload
of both.
"""
