"""Calibration: rates of this machine, measured by the executor's own means, one file per subject. `executor.calibrate`
joins them. (`recording/moment_costs.py` measures the cost of moments of training, on a prepared model.)

Every measurement takes its dependencies as arguments (a `Device`, a `Bench` that times, memory to work on), so that
tests check its arithmetic without a clock.
"""
