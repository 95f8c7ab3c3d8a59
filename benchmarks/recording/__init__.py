"""What benchmarks/gpu_record.py does in processes of its own: the tide of plain training (tide.py), a plan that is run
with every moment's memory read off the allocator (planned.py), bytes of copies from the profiler (memcpy.py)."""
