"""What the user's model does, moment by moment: hooks that tell of it, operators counted, and the recorder that makes a
workload of both. What the engine does beside the model stays unseen. Knows no session.
"""
