"""python -m mpicoll.run -n 2 -m mpicoll.bench [WHAT] [options]; the default of WHAT is all_reduce.

Each implementation is checked before it is timed. They are timed in turn, in the same rounds on the same ranks:

    mpicoll          mpicoll.all_reduce(tensor)
    torch backend    torch.distributed.all_reduce(tensor), backend "mpi"
    Gloo             torch.distributed.all_reduce(tensor, group=...), backend "gloo"
    NCCL             the same with backend "nccl"; with --device cuda, if every rank has a GPU
    MPI              mpi4py on NumPy memory
    floor            a memory copy by one rank, on the host or on its GPU

`WHAT --help` lists the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpicoll._base.stdout import quiet_without_reader
from mpicoll.bench import options


@quiet_without_reader
def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. ``--help`` needs no MPI, and loads no torch."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["-h"], ["--help"]):
        options.make_parser(__doc__).print_help()
        return 0
    from mpicoll.bench import command

    command.run(words, __doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
