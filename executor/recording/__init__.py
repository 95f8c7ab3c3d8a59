"""A real iteration written down: as a workload (`record.py`), and as costs of its moments (`moment_costs.py`)."""
