"""Collectives on the memory of the CPU: which algorithm carries each of them, and how."""
