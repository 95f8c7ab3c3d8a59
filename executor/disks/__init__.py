"""Disks: lists of chunks in files of one or several folders."""
