"""Configurations of DeepSpeed, FSDP and others: read, written, predicted. A module per framework has its table of keys,
reader and writer (targets.py).
"""
