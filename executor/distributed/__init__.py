"""Several processes that train one model: what they agree on, the collectives, and how the others notice a lost
process.
"""
