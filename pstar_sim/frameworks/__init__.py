"""Frameworks: configurations of DeepSpeed, FSDP and others, read, written, and simulated under the framework's own
policy.

keys.py: a table of a framework's keys, and a file read by it. configuration.py: what a configuration says, in our
terms. host_memory.py: what the framework then takes of the host. follows.py: a configuration as a policy.
prediction.py: memory and seconds of a configuration on a machine. express.py: the configuration nearest to a plan. One
module per framework holds its table, its reader and its writer; targets.py lists them.
"""
