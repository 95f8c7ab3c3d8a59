"""Calibration: rates of this machine, measured by the executor's own means, one file per subject.
(`recording/moment_costs.py` measures moments of training, on a prepared model.)

Dependencies are arguments, so that tests check the arithmetic without a clock.
"""
