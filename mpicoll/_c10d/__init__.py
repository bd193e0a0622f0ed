"""The torch backend: mpicoll as a backend of ``torch.distributed``.

    register          what `import torch` runs: backend names, three wrappers, a rendezvous handler; starts nothing
      names           the names under which torch knows the backend
      patches         the table of all changes of torch and Python
      wrapping        a wrapper that sees the arguments by torch's names
    init              init_process_group("mpi") and new_group(backend="mpi"); makes the adapter of each group
      requested_ranks   the rank and size that a program names, compared with MPI
      rendezvous        the store
      torch_world       torch's private tables of groups
    operations        torch's methods, translated for the engine; a base of every adapter
      backend         the adapter for torch >= 2.14
      torch213/       the adapters for torch <= 2.13
    shrinking         reconfigure, shrink and shrink_group
    ddp               two wrappers for DDP, which expects C++ objects
    refused_by_torch  calls that torch refuses before mpicoll sees them
    dynamo            keeps torch.compile out of our code

`import torch` imports the first four; the others are imported when the first group is made.
"""
