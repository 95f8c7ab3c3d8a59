"""Published measurements beside simulated figures: rows.py reads them, scope.py chooses, experiments.py makes jobs,
replay.py plans and simulates, results.py and expected_errors.py compute errors."""
