"""Tests of `mpicoll._base`."""
