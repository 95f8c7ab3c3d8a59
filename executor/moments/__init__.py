"""Moments of the user's model: hooks that report its events, a count of its operators, and the recorder that makes a
workload of both. The engine's own operators are left out.
"""
