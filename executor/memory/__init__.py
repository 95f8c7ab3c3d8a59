"""Chunk payloads: who holds which bytes where, and the tensors that look into them."""
