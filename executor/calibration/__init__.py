"""What this machine does, measured by the executor's own means: a file an idea, joined by `executor.calibrate`
(what moments of training cost is measured on a prepared model: `recording/moment_costs.py`).

Every measurement takes its world as arguments (a `Device`, a `Bench` that times, memory to work on), so that its
arithmetic is tested without a clock.
"""
