"""Tensors: their memory, argument checks, the table dtype x reduction, and reductions by torch kernels."""
