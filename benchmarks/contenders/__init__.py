"""The programs that benchmarks/peers.py compares, each behind the same few questions.

task.py: what is trained and how it is asked for. process.py: a contender's own process, and the pipe to it. worker.py:
the other end of the pipe. ours.py, plain.py, zero.py, fsdp2.py: the contenders; the *.json beside them are their
settings. room.py: bytes per parameter and the largest model. venv.py: the environment that DeepSpeed runs in on a CPU.
"""
