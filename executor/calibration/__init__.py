"""Calibration: rates of this machine, measured by the executor's own means, one file per subject. `executor.calibrate`
joins them. (`recording/moment_costs.py` measures the cost of moments of training, on a prepared model.)

Measurements get their dependencies as arguments, so that tests check the arithmetic without a clock.
"""
