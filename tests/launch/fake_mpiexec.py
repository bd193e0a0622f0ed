"""An mpiexec for tests of processes without MPI: starts ranks on this host and ends them as Open MPI's or MPICH's does.

    python fake_mpiexec.py FAMILY VARIANT [options] -n 2 program args... [: -n 1 program args...]

                        openmpi (as 5.0.11)                         mpich (as 5.0.2)
    a rank fails        soon SIGTERM to the others, then SIGKILL    the others go on
    a rank is killed    soon SIGTERM to the others, then SIGKILL    SIGKILL to the others
    a rank aborts       -                                           SIGKILL to all; `cmd=abort` by PMI_FD
    SIGTERM, SIGINT     SIGTERM to all, then SIGKILL                the same signal to all
    SIGHUP              SIGTERM to all, then SIGKILL                ends itself, and no rank
    SIGUSR1, SIGUSR2    the same signal to all                      ends itself, and no rank
    exit status         of the rank that failed first, 128 + n      of all ranks by a bitwise or, n for signal n

VARIANT: "usual"; "hangs": does not end after its ranks, nor by SIGTERM; "returns 0": always; "deaf": passes no signal on, and
does not end by one.
"""

import contextlib
import os
import re
import signal
import sys
import time

SOON_S, PATIENCE_S = 0.25, 1.0  # until SIGTERM, and from there until SIGKILL
USER = (signal.SIGUSR1, signal.SIGUSR2)
HANDLED = {
    "openmpi": (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *USER),
    "mpich": (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT),
}


def programs(words: list[str]) -> list[list[str]]:
    """The command of each rank: behind -n and what options follow it, of which each has a value."""
    commands = []
    while words:
        end = words.index(":") if ":" in words else len(words)
        part, words = words[words.index("-n") + 1 : end], words[end + 1 :]
        ranks, *command = part
        while command[0].startswith("-"):
            command = command[2:]
        commands += [command] * int(ranks)
    return commands


def variables(family: str, rank: int, size: int, abort: int) -> dict[str, str]:
    if family == "mpich":
        return {
            "PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}", "MPI_LOCALRANKID": f"{rank}", "MPI_LOCALNRANKS": f"{size}",
            "PMI_FD": f"{abort}",
        }  # fmt: skip
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": f"{number}" for name, number in names.items()}


class Mpiexec:
    def __init__(self, family: str, variant: str, commands: list[list[str]]) -> None:
        self.openmpi, self.variant, self.handled = family == "openmpi", variant, HANDLED[family]
        signal.pthread_sigmask(signal.SIG_BLOCK, self.handled)
        self.aborted, abort = os.pipe()
        os.set_inheritable(abort, True)
        os.set_blocking(self.aborted, False)
        self.ranks: set[int] = set()
        for rank, command in enumerate(commands):
            environ = {**os.environ, **variables(family, rank, len(commands), abort)}
            self.ranks.add(os.posix_spawnp(command[0], command, environ, setpgroup=0, setsigmask=()))
        self.status = 0
        self.kill_at: float | None = None

    def run(self) -> int:
        while self.ranks:
            left_s = 60.0 if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
            got = signal.sigtimedwait(self.handled, left_s)
            if got is None:
                self.signal(signal.SIGKILL)
                self.kill_at = None
            elif got.si_signo == signal.SIGCHLD:
                self.reap()
            elif self.variant != "deaf":
                self.take(signal.Signals(got.si_signo))
        while self.variant == "hangs":
            time.sleep(1)
        return 0 if self.variant == "returns 0" else self.status

    def take(self, number: signal.Signals) -> None:
        if self.openmpi and number not in USER:
            self.status = self.status or 1
            self.end()
        else:
            self.signal(number)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self.ranks.discard(ended[0])
                self.note(os.waitstatus_to_exitcode(ended[1]))

    def note(self, code: int) -> None:
        """Notes the end of a rank."""
        if self.openmpi and code and not self.status:
            self.status = code if code > 0 else 128 - code
            time.sleep(SOON_S)
            self.end()
        elif not self.openmpi:
            self.status |= abs(code)
            with contextlib.suppress(BlockingIOError):
                self.status = int(re.findall(rb"exitcode=(\d+)", os.read(self.aborted, 999))[0])
                code = -signal.SIGKILL
            if code < 0:
                self.signal(signal.SIGKILL)

    def end(self) -> None:
        self.signal(signal.SIGTERM)
        self.kill_at = time.monotonic() + PATIENCE_S

    def signal(self, number: int) -> None:
        for pid in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


if __name__ == "__main__":
    sys.exit(Mpiexec(sys.argv[1], sys.argv[2], programs(sys.argv[3:])).run())
