"""Chunk payloads: their memory in each place, their contents, and the tensors that are views of them."""
