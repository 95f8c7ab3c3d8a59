"""Lifetime of a session: its begin, its change to another plan, its end; values into chunks and back, hooks on the
modules, resources of the process.
"""
