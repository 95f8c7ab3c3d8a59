"""Several processes that train one model: what they agree on, the collectives, and what a lost one
does to the others.
"""
