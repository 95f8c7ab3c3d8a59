"""Validation: the simulator replays published measurements, and predicted figures are compared with published ones.

rows.py reads the measurements, scope.py says which of them are compared, experiments.py turns a published run into a
job, replay.py plans and simulates it, report.py says how far off the predictions are, expected_errors.py by class of
machine.
"""
