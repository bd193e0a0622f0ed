"""What a tensor is: its memory, which tensors are allowed, dtype x reduction, torch's kernels for reductions."""
