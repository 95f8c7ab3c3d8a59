"""How a session begins, goes on under another plan and ends: values into chunks and back, hooks on the modules, what it
holds of the process.
"""
