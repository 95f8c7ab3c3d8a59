"""A session's begin, change to another plan, and end; values into chunks and back, hooks on the modules, resources of
the process.
"""
