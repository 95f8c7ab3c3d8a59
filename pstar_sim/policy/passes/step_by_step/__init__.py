"""For policies that write steps one by one into a Builder: gradients of micro-batches and ranks, whole chunks, disks,
checks of room."""
