"""Devices: memory and copies on the virtual accelerator, with and without asynchronous streams, and on CUDA."""
