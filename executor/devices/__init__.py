"""Where memory is and copies happen: the virtual accelerator, the one with asynchronous streams, CUDA.

`backend.py` says what a device must be able to do; `opening.py` opens the one that was asked for. `adam.py` is
the arithmetic of an update, the same on all of them.
"""
