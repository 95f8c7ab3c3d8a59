"""A real iteration written down: as a workload (`record.py`), and as what its moments cost (`moment_costs.py`)."""
