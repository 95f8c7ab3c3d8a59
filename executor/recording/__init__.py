"""Recordings of a real iteration: as a workload (`record.py`), and as costs of its moments (`moment_costs.py`)."""
