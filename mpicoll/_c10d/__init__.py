"""Door 2: mpicoll as a backend of ``torch.distributed``.

    register        what happens at ``import torch``: names, two wrappers, a rendezvous handler; no MPI, no work
    wrapping        the form of those wrappers: arguments by torch's names, however programs pass them on
    requested       the rank and size that a call names, and whether MPI has so many
    world           init_process_group("mpi"), new_group(backend="mpi"): starts MPI, hands torch a real store, cleans up
    some_ranks      init_process_group for some of MPI's ranks: they meet at the store that they were given
    rendezvous      the store: rank 0 opens it, host and port travel by MPI
    process_group   what torch <= 2.13 accepts: a subclass of ProcessGroup
    kernels         for torch <= 2.13: two ops of compiled graphs that its C++ cannot do with such a group
    backend         what torch >= 2.14 accepts: a subclass of Backend
    untraced        torch.compile's tracer stays out of all that
    ddp             what DDP's C++ wants of a backend that is C++
    operations      what both translate, once: lists of one tensor, option objects, names of methods

Only ``register`` is imported when torch is imported; the other modules when the first group is made.
"""
