"""Tests of `mpicoll._discovery`."""
