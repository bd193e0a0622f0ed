"""Runs mpiexec as a child, ends the job as a whole, and says how it ended.

    supervisor ──fork──► mpiexec ──► monitor ──► program          one monitor for each rank, on any host
        ▲ ▲                             │
        │ └── signals (signalfd)        │ reports by TCP: `mpicoll._launch.reports`
        └───────────────────────────────┘

The exit status is that of the rank that failed first (128 + n for signal n), whatever mpiexec returns; 0 only if mpiexec and all
ranks that have reported ended with 0. The last line on standard error names that rank and the cause.

How a job ends:

    a rank fails          mpiexec has SETTLE_S to end the job, then SIGTERM to mpiexec and to the ranks
    SIGTERM, SIGINT ...   passed on to mpiexec, which passes it on to the ranks
    in both cases         after the grace SIGKILL to the ranks, and KILL_S later to mpiexec
    mpiexec has ended     after LAST_REPORTS_S SIGTERM to ranks that are left, SIGKILL after the grace
    all ranks have ended  mpiexec has LEFT_BEHIND_S to end: Open MPI 5 may hang for ever if a rank fails while others start MPI
    the supervisor dies   mpiexec gets SIGTERM by the kernel; monitors see their connections break
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpicoll._base import processes
from mpicoll._base.errors import LaunchError
from mpicoll._base.inherited import SUPERVISOR
from mpicoll._base.waits import GONE_S, KILL_S, LAST_REPORTS_S, LEFT_BEHIND_S, SETTLE_S, SHORT_LOOK_S, STOP_S
from mpicoll._launch import linux
from mpicoll._launch.job import Plan
from mpicoll._launch.monitor import PIPED
from mpicoll._launch.output import Output, fatal
from mpicoll._launch.reports import Rank, Reports, address_towards, shell_status, signal_name, unknown_hosts

NOT_STARTED = 213  # of Open MPI's mpiexec: 256 - 43, PRTE_ERR_SILENT; also for options that it does not know

ENDING = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
OF_THE_USER = frozenset((signal.SIGUSR1, signal.SIGUSR2))
PASSED_ON = ENDING | OF_THE_USER


@dataclass(frozen=True)
class Outcome:
    """How a job has ended.

    signal: the one that told this process to end the job, or 0. cause: empty if the job ended well. begun: whether a rank began.
    alone: number of ranks if each has worked without the others. first: the rank that has caused the end. alike: ranks that have
    ended by the same error, without a traceback.
    """

    status: int
    cause: str
    signal: int = 0
    begun: bool = True
    alone: int = 0
    first: Rank | None = None
    alike: Sequence[int] = ()


class Step(enum.IntEnum):
    """What ends a job that does not end by itself, one after the other."""

    END_RANKS = 1
    KILL_RANKS = 2
    KILL_MPIEXEC = 3


class Supervisor:
    """Runs jobs, one after the other. From its making on, signals of `PASSED_ON` wait until a job or `pause` reads them."""

    def __init__(self) -> None:
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # a shell script ignores SIGINT for its background jobs, too
        passed_on = PASSED_ON - {signal.SIGHUP} if nohup else PASSED_ON
        self.signals = linux.Signals(passed_on | {signal.SIGCHLD})

    def run(self, plan: Plan, environ: Mapping[str, str], grace_s: float) -> Outcome:
        """Runs the job until it has ended on all hosts. Raises LaunchError if mpiexec cannot be started.

        Args:
            environ: Of mpiexec.
            grace_s: Between SIGTERM and SIGKILL.
        """
        with selectors.DefaultSelector() as selector:
            return _Job(plan, grace_s, selector, self.signals).run(environ)

    def pause(self, seconds: float) -> int:
        """Waits. Returns the signal that ended the wait, or 0."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.signals, selectors.EVENT_READ)
            while selector.select(max(0.0, end - time.monotonic())):
                for each in self.signals.read():
                    if each.si_signo in ENDING:
                        return each.si_signo
        return 0


class _Job:
    def __init__(self, plan: Plan, grace_s: float, selector: selectors.BaseSelector, signals: linux.Signals) -> None:
        self.plan, self.grace_s, self.selector, self.signals = plan, grace_s, selector, signals
        self.tolerant = "--with-ft" in plan.command  # goes on without ranks that were lost by a signal
        self.told_by, self.told_at = 0, 0  # the signal that told this process to end the job, and when (ns)
        self.next_step: tuple[float, Step] | None = None  # when
        self.began_s = time.time()
        self.ended_by_us = False
        self.given_up = False

    def run(self, environ: Mapping[str, str]) -> Outcome:
        secret = secrets.token_hex(16)
        address = address_towards(self.plan.other_hosts)
        self.reports = Reports(self.selector, address, secret)
        environ = {
            **environ,
            SUPERVISOR: f"{address} {self.reports.port} {secret} {self.grace_s:g}{'' if os.isatty(1) else PIPED}",
        }
        me = os.getpid()

        def in_child() -> None:
            self.signals.restore()
            linux.end_with_parent(me, signal.SIGTERM)

        targets = (2, 1) if self.plan.family == "mpich" else (2,)
        self.errors, *others = self.outputs = [Output(target, not self.tolerant) for target in targets]
        stdout = others[0].pipe if others else None
        try:  # in the process group of this process: mpiexec may read from the terminal
            self.mpiexec = subprocess.Popen(
                self.plan.command, env=environ, preexec_fn=in_child, stdout=stdout, stderr=self.errors.pipe
            )
        except OSError as error:
            raise LaunchError(f"cannot start {self.plan.command[0]}: {error.strerror}") from error
        finally:
            for each in self.outputs:
                each.start()
        self.selector.register(self.signals, selectors.EVENT_READ, self._take_signals)
        while not self._over():
            limit = None if self.next_step is None else max(0.0, self.next_step[0] - time.monotonic())
            for key, _ in self.selector.select(limit):
                key.data()
            self._advance(time.monotonic())
        self._wait_for_output()
        outcome = self._outcome()
        for each in self.outputs:
            if outcome.first is None and not outcome.signal and not each.writing:
                each.write(each.kept)
        self.selector.unregister(self.signals)
        self.reports.close()
        if outcome.status:
            self._wait_for_ranks_here()
            linux.remove_leftovers(self.began_s)
        return outcome

    def _wait_for_output(self) -> None:
        """Until all is passed on, however slow its reader is. A process that mpiexec has left behind may hold the pipe."""
        deadline = time.monotonic() + LAST_REPORTS_S
        while any(each.thread.is_alive() for each in self.outputs) and time.monotonic() < deadline:
            time.sleep(0.01)
            if any(each.writing for each in self.outputs):
                deadline = time.monotonic() + LAST_REPORTS_S
            if told := [each.si_signo for each in self.signals.read() if each.si_signo in ENDING]:  # no restart either
                self.told_by, self.told_at = self.told_by or told[0], self.told_at or time.time_ns()
                return

    def _wait_for_ranks_here(self) -> None:
        """Hydra kills the monitors and ends at once. Their ranks get a signal then, and still use their memory for a moment."""
        here, deadline = socket.gethostname(), time.monotonic() + GONE_S
        pids = [rank.pid for rank in self.reports.ranks.values() if rank.host == here]
        while any(processes.state(pid) != processes.ENDED for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _over(self) -> bool:
        if self.mpiexec.poll() is None:
            return False
        for key, _ in self.selector.select(0):  # what monitors sent before mpiexec ended
            key.data()
        return self.given_up or not (self.reports.connected() or self.selector.select(0))

    # --- the end of the job ---

    def _take_signals(self) -> None:
        for each in self.signals.read():
            number = each.si_signo
            if number == signal.SIGCHLD:
                continue
            if number in ENDING and not self.told_by:
                self.told_by, self.told_at = number, time.time_ns()
                self._in(self.grace_s, Step.KILL_RANKS)
            if number in OF_THE_USER and self.plan.family == "mpich":  # Hydra would die of it
                self.reports.tell(f"signal {number}")
            elif each.si_code != linux.FROM_KERNEL and self.mpiexec.poll() is None:
                # Hydra would die of SIGHUP and leave its proxies.
                hangup = number == signal.SIGHUP and self.plan.family == "mpich"
                self.mpiexec.send_signal(signal.SIGTERM if hangup else number)

    def _in(self, delay_s: float, step: Step) -> None:
        """Plans a step, unless a later one is planned, or the same one sooner."""
        at = time.monotonic() + delay_s
        if self.next_step is None or self.next_step[1] < step or (self.next_step[1] == step and at < self.next_step[0]):
            self.next_step = (at, step)

    def _advance(self, now: float) -> None:
        if self.next_step is not None and now >= self.next_step[0]:
            self._take(self.next_step[1])
        elif self.mpiexec.poll() is not None:
            if self.reports.connected() and self.next_step is None:
                self._in(LAST_REPORTS_S, Step.END_RANKS)
        elif self.reports.all_ended():
            self._in(LEFT_BEHIND_S, Step.KILL_MPIEXEC)
        elif self.reports.failed() and not self.tolerant and self.next_step is None:
            self._in(SETTLE_S, Step.END_RANKS)

    def _take(self, step: Step) -> None:
        self.next_step = None
        running = self.mpiexec.poll() is None
        self.ended_by_us |= running and step != Step.KILL_RANKS
        if step == Step.END_RANKS:
            if running:
                self.mpiexec.terminate()
            self.reports.tell("end")
            self._in(self.grace_s, Step.KILL_RANKS)
        elif step == Step.KILL_RANKS:
            self.reports.tell("kill")
            self._in(KILL_S, Step.KILL_MPIEXEC)
        elif running:
            self._kill_mpiexec()
            self._in(KILL_S, Step.KILL_MPIEXEC)
        else:
            self.given_up = True  # a host that does not answer

    def _kill_mpiexec(self) -> None:
        """Kills mpiexec, and what it has started here: an ssh to a lost host would keep standard error open for minutes."""
        left = processes.children(self.mpiexec.pid)
        self.mpiexec.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- the result ---

    def _outcome(self) -> Outcome:
        status, ranks = self.mpiexec.returncode, self.reports.ranks
        if self.tolerant and any(rank.status == 0 for rank in ranks.values()):
            status = 0
            for number in [number for number, rank in ranks.items() if rank.lost or (rank.status or 0) < 0]:
                del ranks[number]
        failed = status != 0 or self.reports.failed()
        first = self.reports.first_cause(fatal(self.errors.kept)) if failed else None
        if first is not None and first.lost and not first.why and status != 0 and not self.ended_by_us:
            first = None  # mpiexec has killed all ranks with their monitors
        if self.told_by and (first is None or first.at() >= self.told_at):
            return Outcome(128 + self.told_by, f"ended by {signal_name(self.told_by)}", self.told_by)
        if first is not None:
            on_host = f" on {first.host}" if first.host else ""
            text = f"rank {first.number} of {self.reports.size}{on_host}: {first.how()}"
            return Outcome(first.exit_status(), text, self.told_by, first=first, alike=self.reports.alike)
        if not failed:
            return Outcome(0, "", alone=len(ranks) if len(ranks) > 1 and all(rank.alone for rank in ranks.values()) else 0)
        how = f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
        began = "no rank said why" if ranks else "; ".join(["no rank began", *unknown_hosts(self.plan.other_hosts)])
        return Outcome(shell_status(status), f"mpiexec: {how}; {began}", begun=bool(ranks))


def main(folder_name: str) -> None:
    """Runs the plan in the folder for `mpicoll._launch.spawn`, whose process keeps its signals, and writes the outcome there."""
    folder = Path(folder_name)
    caller, plan = pickle.loads((folder / "plan").read_bytes())
    supervisor = Supervisor()
    threading.Thread(target=_end_after, args=(caller,), daemon=True).start()
    outcome = supervisor.run(plan, os.environ, STOP_S)
    (folder / "outcome").write_bytes(pickle.dumps(outcome))


def _end_after(caller: int) -> None:
    """Ends the job after the parent process. PR_SET_PDEATHSIG would end it after the thread that has called spawn."""
    while os.getppid() == caller:
        time.sleep(SHORT_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
