"""Frameworks: reads and writes configurations of DeepSpeed, FSDP and others, and predicts them. One module per
framework holds its table, its reader and its writer; targets.py lists them.
"""
