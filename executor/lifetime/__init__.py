"""How a session begins, goes on under another plan and ends: values into chunks and back, hooks on the modules,
resources of the process.
"""
