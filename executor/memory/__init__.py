"""Chunk payloads: which bytes lie where, and the tensors that are views of them."""
