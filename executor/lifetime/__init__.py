"""How a session begins, goes on under another plan and ends: values into chunks and back, and what it holds of the
process.
"""
