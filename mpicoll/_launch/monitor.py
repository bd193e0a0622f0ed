"""The monitor of a rank: the parent of its program, which tells `mpicoll._launch.supervisor` how the program ends.

    mpiexec ──► monitor ──fork──► program
                  │  ▲               │ pipe and memory:
     TCP, lines   ▼  │ waitpid ◄─────┘ `mpicoll._base.last_words`
              supervisor

The exit status of mpiexec does not say how each rank ended, and is 0 after some losses. The monitor is the parent of the program
and therefore knows, for any program and on any host. It reports before it ends itself, so the first report is the first cause.
It ends as the program has ended, by the same status or signal, so that mpiexec sees what it would see without a monitor.

The program never outlives the job: it gets SIGKILL when its monitor dies; and the monitor ends it when the connection to the
supervisor breaks, that is, when the supervisor has died, or cannot be reached for about 11 s; and when the monitor's parent has
died: Hydra goes on without its daemon on another host.

Lines to the supervisor: values of a `mpicoll._launch.reports.Rank` in JSON; the secret is before the first of them.
Lines from it: `end` (SIGTERM, and SIGKILL after the grace), `kill`, `signal NUMBER` (for the program); `new` or `known` after a
`why`, which the program reads, too: whether another rank has given the same reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING

from mpicoll._base import last_words
from mpicoll._base.inherited import SUPERVISOR
from mpicoll._base.launcher import detect
from mpicoll._base.waits import CONNECT_S, FORWARDING_S
from mpicoll._launch import linux

if TYPE_CHECKING:
    import selectors
    import socket
    import threading

LOOPBACK = "127.0.0.1"
PIPED = " piped"  # at the end of `SUPERVISOR`: standard output of `mpicoll run` is no terminal
# Signals that a launcher sends to the process group of a rank, or a terminal to its job: meant for the program.
FOR_THE_PROGRAM = frozenset(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")
)


def start() -> None:
    """Forks, if `mpicoll.run` has asked for a monitor: returns in the child only, which then runs the program."""
    words = os.environ.pop(SUPERVISOR, None)
    if words is None:
        return
    began_s = time.time()
    told, tell = os.pipe()
    answered, answer = os.pipe()
    memory = last_words.Memory()
    monitor, launcher = os.getpid(), os.getppid()
    piped = os.pipe() if words.endswith(PIPED) and os.isatty(1) else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_PROGRAM)  # one would end the monitor before it ignores them
    child = os.fork()
    if child == 0:
        os.close(told)
        os.close(answer)
        if piped is not None:
            os.dup2(piped[1], 1)
            for end in piped:
                os.close(end)
        linux.end_with_parent(monitor, signal.SIGKILL)
        last_words.use(tell, answered, launcher, memory)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    for number in FOR_THE_PROGRAM:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.close(tell)
    os.close(answered)
    passing = None if piped is None else _pass_on(*piped)
    status = 1
    try:
        watch = Monitor(child, (told, answer), memory, words, began_s, launcher)
        status = watch.run()
        if passing is not None:
            passing.join(FORWARDING_S if watch.told_to_end else None)
        if watch.told_to_end and os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)  # processes that the program has started
    finally:
        _end_as(status)


def _pass_on(source: int, end: int) -> threading.Thread:
    """Passes on what the program writes into this pipe to our standard output, which Open MPI's mpiexec has made a terminal."""
    import threading

    os.close(end)
    target = os.dup(1)

    def pass_on() -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more; then the program learns it as from any pipe
            while data := os.read(source, 1 << 16):
                while data:
                    data = data[os.write(target, data) :]
        os.close(target)
        os.close(source)

    thread = threading.Thread(target=pass_on, daemon=True)
    thread.start()
    return thread


class Monitor:
    """Waits for the program ``child``; its last words come from the first of ``pipes``, and answers go to the second.

    ``memory``: what the program was doing when its watchdog looked last.
    """

    def __init__(
        self, child: int, pipes: tuple[int, int], memory: last_words.Memory, words: str, began_s: float, launcher: int
    ) -> None:
        self.child, (self.told, self.answer), self.memory = child, pipes, memory
        self.address, port, self.secret, grace, *_ = words.split()
        self.port, self.grace_s = int(port), float(grace)
        self.began_s = began_s
        self.oom_kills = linux.oom_kills()
        self.launcher = launcher  # mpiexec, or its daemon on this host
        self.status: int | None = None  # of the program, once it has ended; negative: its signal
        self.returned = False
        self.kill_at: float | None = None
        self.told_to_end = False
        self._connection: socket.socket | None = None
        self._heard = self._said = b""

    def run(self) -> int:
        """Returns the program's exit status, or minus the signal that ended it."""
        import selectors

        with selectors.DefaultSelector() as selector:
            self._watch_child(selector)
            selector.register(self.told, selectors.EVENT_READ, self._hear_program)
            self._connect(selector)
            linux.end_with_parent(self.launcher, signal.SIGCHLD)  # which wakes this loop
            while not self._ended():
                if os.getppid() != self.launcher and not self.told_to_end:
                    self._say(why="its parent, mpiexec or a daemon of it, was lost", why_at=time.time_ns())
                    self._end(self.grace_s)
                limit = None if self.kill_at is None else max(0.0, self.kill_at - time.monotonic())
                for key, _ in selector.select(limit):
                    key.data(selector)
                if self.kill_at is not None and time.monotonic() >= self.kill_at:
                    os.kill(self.child, signal.SIGKILL)
                    self.kill_at = None
            self._hear_program(selector)
        assert self.status is not None
        well = self.status == 0 and self.returned
        if not well and (written := self.memory.read()) is not None:
            self._say(was=f"{time.monotonic() - written[0]:.1f} s before, {written[1]}")
        if self.status == -signal.SIGKILL and linux.oom_kills() > self.oom_kills:
            self._say(oom=True)
        self._say(ended_at=time.time_ns(), status=self.status)
        if not well and (self.address != LOOPBACK or self._connection is None):  # else the supervisor removes them
            linux.remove_leftovers(self.began_s)
        if self._connection is not None:
            self._connection.close()
        return self.status

    def _watch_child(self, selector: selectors.BaseSelector) -> None:
        import selectors

        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # who reads the output of the program must see its end when the program closes it
            os.dup2(null, number)
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector.register(woken, selectors.EVENT_READ, lambda _: os.read(woken, 100))

    def _ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.child, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    # --- the program ---

    def _hear_program(self, selector: selectors.BaseSelector) -> None:
        os.set_blocking(self.told, False)
        try:
            data = os.read(self.told, 1 << 16)
        except BlockingIOError:
            return
        if not data and self.told in selector.get_map():
            selector.unregister(self.told)
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            said = json.loads(line)
            self.returned |= said.get("returned", False)
            end = said.pop("end", False)
            if "why" in said:
                said["why_at"] = time.time_ns()
            self._say(**said)
            if end:
                self._end(self.grace_s)
            if "why" not in said or self._connection is None:
                self._answer_program(b"new")

    def _answer_program(self, word: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.write(self.answer, word + b"\n")

    # --- the supervisor ---

    def _connect(self, selector: selectors.BaseSelector) -> None:
        import selectors
        import socket

        launch = detect()
        if launch is None:
            return
        try:
            connection = socket.create_connection((self.address, self.port), CONNECT_S)
            linux.keep_alive(connection)
        except OSError:
            return
        self._connection = connection
        begin = {"number": launch.rank, "size": launch.size, "pid": self.child, "host": socket.gethostname() or "?"}
        self._say(f"{self.secret} ", **begin)
        selector.register(connection, selectors.EVENT_READ, self._hear_supervisor)

    def _say(self, before: str = "", **said: object) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the supervisor has died; `_hear_supervisor` sees that, too
                self._connection.sendall(f"{before}{json.dumps(said)}\n".encode())

    def _hear_supervisor(self, selector: selectors.BaseSelector) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            if line.startswith(b"signal "):
                os.kill(self.child, int(line.split()[1]))
            elif line in (b"new", b"known"):
                self._answer_program(line)
        if b"kill" in lines:
            self._end(0)
        elif b"end" in lines or not data:
            self._end(self.grace_s)

    def _end(self, grace_s: float) -> None:
        if not self.told_to_end:
            self.told_to_end = True
            if os.getpgid(0) == os.getpid():
                os.killpg(0, signal.SIGTERM)
            else:
                os.kill(self.child, signal.SIGTERM)
        at = time.monotonic() + grace_s
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)


def _end_as(status: int) -> None:
    """Ends this process by the exit status, or by the signal, that ended the program."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written its core file
        number = -status
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
        status = 128 + number  # a signal that does not end a process
    os._exit(status)
