"""Validation: replays published measurements in the simulator, and compares predicted with published figures.

rows.py reads the measurements, scope.py says which are compared, experiments.py turns a published run into a job,
replay.py plans and simulates it, results.py and expected_errors.py compute the errors.
"""
