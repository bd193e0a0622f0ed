"""Collectives and messages on CPU memory, and the choice of algorithms."""
