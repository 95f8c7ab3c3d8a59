"""Passes for policies that write their steps one by one into a Builder: gradients of micro-batches and ranks, chunks
that are whole on every GPU, lists on disks, checks of room."""
