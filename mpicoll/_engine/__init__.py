"""One object per group, which checks, prepares and runs each operation, and the registry of groups."""
