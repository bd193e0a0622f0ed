"""The torch backend: mpicoll as a backend of ``torch.distributed``.

    register          what `import torch` runs: backend names, two wrappers, a rendezvous handler; starts nothing
      names           the names under which torch knows the backend
      patches         the table of all changes of torch and Python
      wrapping        a wrapper that sees the arguments by torch's names
    init              init_process_group("mpi") and new_group(backend="mpi")
      requested_ranks   the rank and size that a program names, compared with MPI
      some_ranks        a world of some of MPI's ranks
      rendezvous        the store
      member_names      names of groups that their members alone make
      excepthooks       an uncaught exception ends the job
      torch_world       torch's private tables of groups
    adapters          makes the object that torch calls, one for each group
      operations      torch's methods, translated for the engine; a base of every adapter
      backend         the adapter for torch >= 2.14
      torch213/       the adapters for torch <= 2.13
      ddp             two wrappers for DDP, which expects C++ objects
      failed_calls    what torch's own code refuses
      dynamo          keeps torch.compile out of our code

`import torch` imports the first four; the others are imported when the first group is made.
"""
