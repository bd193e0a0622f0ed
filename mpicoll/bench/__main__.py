"""mpicoll bench [options of `mpicoll run`] [WHAT] [options], or in a job python -m mpicoll.bench [WHAT] [options].

Each implementation is checked before it is timed. They are timed in turn, in the same rounds on the same ranks:

    mpicoll          mpicoll.all_reduce(tensor)
    torch backend    torch.distributed.all_reduce(tensor), backend "mpi"
    Gloo             torch.distributed.all_reduce(tensor, group=...), backend "gloo"
    NCCL             the same with backend "nccl"; with --device cuda, if every rank has a GPU
    MPI              mpi4py on NumPy memory
    floor            a memory copy by one rank, on the host or on its GPU
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpicoll._base.stdout import quiet_without_reader
from mpicoll.bench import options


@quiet_without_reader
def main(arguments: Sequence[str] | None = None, prog: str = "python -m mpicoll.bench") -> int:
    """Returns the exit status. ``--help`` needs no MPI, and loads no torch."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(words):
        options.make_parser(prog, __doc__).print_help()
        return 0
    from mpicoll.bench import command

    command.run(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
