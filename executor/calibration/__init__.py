"""Rates of this machine, measured by the executor's own means: one file per idea, joined by `executor.calibrate`.
(`recording/moment_costs.py` measures the cost of moments of training, on a prepared model.)

Every measurement takes its world as arguments (a `Device`, a `Bench` that times, memory to work on), so that its
arithmetic is tested without a clock.
"""
