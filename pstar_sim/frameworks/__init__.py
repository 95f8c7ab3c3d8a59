"""Frameworks: reads and writes configurations of DeepSpeed, FSDP and others, and predicts them under the policy that
stands for the framework.

keys.py: tables of a framework's keys, and reading a file by a table. configuration.py: the content of a configuration
in our terms. host_memory.py: host memory that the framework takes. follows.py: a configuration as a policy.
prediction.py: memory and seconds of a configuration on a machine. express.py: the configuration nearest to a plan. One
module per framework holds its table, its reader and its writer; targets.py lists these modules.
"""
