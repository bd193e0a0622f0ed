"""What must run before torch and MPI: settings, errors, the launcher's variables, cores, and plain facts about calls."""
