"""Validation: replays published measurements in the simulator, and compares predicted with published figures.

rows.py reads the measurements. scope.py says which of them are compared. experiments.py turns a published run into a
job. replay.py plans and simulates the job. results.py computes the errors of the predictions, expected_errors.py by
class of machine.
"""
