"""PMI-1 without mpiexec: how MPICH, Intel MPI and MVAPICH learn who else is there, answered by a thread of the process itself.

    MPI_Init_thread ──► PMI_FD, one end of a socketpair ──► thread: one answer to each line ──► ``gather``, at each barrier

MPI puts a few addresses, calls the barrier, and gets the addresses of all. So nothing is sent before a barrier, which hands what
every rank has put to every rank. MPI asks for the last time in C's exit(), where no thread of Python runs: that answer is sent
in advance.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import groupby

Gather = Callable[[str], list[str]]  # hands the texts of all ranks to each rank (collective)

ANSWERS = {
    "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "maxes kvsname_max=256 keylen_max=256 vallen_max=4096 rc=0",
    "get_appnum": "appnum appnum=0 rc=0",
    "get_universe_size": "universe_size size={size} rc=0",
    "get_my_kvsname": "my_kvsname kvsname={name} rc=0",
    "put": "put_result rc=0 msg=success",
    "barrier_in": "barrier_out rc=0",
    "finalize": "finalize_ack rc=0",
}
OTHER = "has an MPI that does not speak PMI 1: start the ranks by `mpicoll run`, mpirun or srun"


class Server:
    """Answers the MPI of this process.

    Args:
        name: Of the key-value space, another one for each world: MPICH names files in /dev/shm after it.
        hosts: What identifies the host of each rank.
        fail: Ends this process, and tells the others why, with an exit status. For MPI_Abort.
    """

    def __init__(self, rank: int, name: str, hosts: Sequence[str], gather: Gather, fail: Callable[[str, int], None]) -> None:
        self._end, of_mpi = socket.socketpair()
        self._name, self._size, self._gather, self._fail = name, len(hosts), gather, fail
        self._put = list[str]()  # since the last barrier, "KEY=VALUE"
        self._values = {"PMI_process_mapping": mapping(hosts)}
        of_mpi.set_inheritable(True)  # a process that the rank starts must see that the number is taken, as under Hydra
        local = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        os.environ.update(
            PMI_FD=str(of_mpi.detach()), PMI_RANK=str(rank), PMI_SIZE=str(len(hosts)), PMI_JOBID=name,
            MPI_LOCALRANKID=str(local.index(rank)), MPI_LOCALNRANKS=str(len(local)),
        )  # fmt: skip
        threading.Thread(target=self._serve, name="mpicoll PMI", daemon=True).start()

    def stop(self) -> None:
        """Answers in advance what MPI asks in C's exit(). The thread keeps the connection open until then."""
        with contextlib.suppress(BrokenPipeError):  # Intel MPI has asked in MPI_Finalize, and closed it
            self._end.sendall(f"cmd={ANSWERS['finalize']}\n".encode())
        self._gather = list

    def _serve(self) -> None:
        with self._end.dup().makefile("r") as lines:
            for line in lines:
                words = dict(re.findall(r"(\w+)=(\S*)", line))
                self._end.sendall(f"cmd={self._answer(words)}\n".encode())

    def _answer(self, words: dict[str, str]) -> str:
        command = words.get("cmd", "")
        if command == "init" and words.get("pmi_version") != "1":
            print(f"mpicoll: this process {OTHER}", file=sys.stderr, flush=True)
            self._fail(OTHER, 1)
        if command == "get":
            value = self._values.get(words["key"])
            return f"get_result rc={0 if value else -1} msg={'success' if value else 'not_found'} value={value or 'unknown'}"
        if command == "abort":
            self._fail(f"has called MPI_Abort: {words.get('exitcode', '?')}", int(words.get("exitcode", 1)))
        if command == "put":
            self._put.append(f"{words['key']}={words['value']}")
        if command == "barrier_in":
            for text in self._gather("\n".join(self._put)):
                self._values.update(re.findall(r"(.*?)=(.*)", text))
            self._put.clear()
        return ANSWERS.get(command, f"{command}_result rc=-1 msg=not_supported").format(size=self._size, name=self._name)


def mapping(hosts: Sequence[str]) -> str:
    """The hosts of the ranks as PMI writes them: a block (number of the host, hosts, ranks) for each run of ranks on one host."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return f"(vector,{','.join(f'({numbers[host]},1,{len(list(run))})' for host, run in groupby(hosts))})"
