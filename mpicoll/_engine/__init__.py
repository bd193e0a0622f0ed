"""One object per group: for each operation check, prepare, run. And the registry of groups."""
