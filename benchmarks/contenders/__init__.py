"""The programs that benchmarks/peers.py compares, each behind the same interface.

task.py: the training task and the requests. process.py: a contender's own process, and the pipe to it. worker.py: the
other end of the pipe. ours.py, plain.py, zero.py, fsdp2.py: the contenders; the *.json files beside them are their
settings. room.py: bytes per parameter and the largest model. venv.py: DeepSpeed's environment on a CPU.
"""
