"""The parts of benchmarks/gpu_record.py that run in processes of their own: the tide of plain training (tide.py), a run
of a plan with every moment's memory read from the allocator (planned.py), bytes of copies from the profiler
(memcpy.py)."""
