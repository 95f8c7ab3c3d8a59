"""Devices: memory and copies on the virtual accelerator, on the virtual accelerator with asynchronous streams, and on
CUDA.

`backend.py` defines the interface of a device; `opening.py` opens the requested device.
"""
