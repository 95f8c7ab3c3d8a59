"""Several processes that train one model: their agreements, the collectives, and the detection of a lost process."""
