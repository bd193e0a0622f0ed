"""Benchmarks that the makers of mpicoll run, from the root of the repository. README.md says which question each answers."""
