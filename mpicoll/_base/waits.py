"""How long fault reports and supervision wait, in seconds: one row for each time, with its reason.

A row that is `_scaled` is patience before something is said, or the time between two looks. Tests shorten it by
`_MPICOLL_TIME_SCALE`, a number that is read once. The other rows, and ``least_s``, give another process that lives the time to do
something: shorter ones would take a process on a busy machine for one that is lost.
"""

from __future__ import annotations

import math
import os


def _read_scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:  # also for nan
        raise ValueError(f"_MPICOLL_TIME_SCALE={text!r} is not allowed; use a positive number")
    return scale


SCALE = _read_scale(os.environ.get("_MPICOLL_TIME_SCALE", "1"))


def _scaled(seconds: float, least_s: float = 0.0) -> float:
    return max(seconds * SCALE, least_s)


# -- a rank that waits for others (_engine, _faults, rpc) ----------------------------------------------------------------

LOOK_S = _scaled(1.0)  # between two looks of the watchdog, of the flight recorder for a request, and of an RPC agent at processes
SHORT_LOOK_S = 0.1  # the same for dead ranks, and in a roll call for questions
BLOCKED_S = 0.25  # until a call counts as one that waits for ranks: of those that have left it, some may be about to end it
ASK_AFTER_S = _scaled(1.0)  # until a rank asks others; shorter if a group's timeout is short
PATIENCE_S = _scaled(3.0)  # until a rank names the missing; ranks of a healthy job are never level
MOST_PATIENCE_S = _scaled(300.0)  # between two such lines of one group
SILENT_S = _scaled(2.5, least_s=1.5)  # until no answer is a sign: a rank that runs answers within two looks
LEAD_S = _scaled(3.0, least_s=1.5)  # of the lowest rank that waits: it ends the job, and the others need not say the same
STACK_S = _scaled(1.5, least_s=0.7)  # for other ranks to show where they are, before the job ends
BOARD_S = 5.0  # a collective stands on a board at least so long, in case another rank is late
RAISES_S = _scaled(2.0, least_s=1.0)  # after an error on one rank: different calls may raise on the other one, too
RECORDS_S = 4.0  # for the flight records of the other ranks
ANSWER_OF_FIRST_S = 5.0  # rank 0 collects what the others say until the limit, and its answer reaches them later
AT_END_S = _scaled(5.0) + SILENT_S  # until a rank that has come to its end names those that have not
EXIT_S = _scaled(10.0, least_s=3.0)  # at exit, for the collectives that a rank has started
HAS_COME_S = 1.0  # for a worker to say whether it has come to its shutdown
ALIVE_S = 0.05  # between two looks at the processes of the other ranks, while a rank waits in shared memory

# -- ranks that make a world or a group (_mpi) -----------------------------------------------------------------------------

INIT_S = _scaled(30.0)  # until a rank says that MPI_Init does not return
PATIENCE_AT_START_S = 10.0  # PATIENCE_S where programs have just begun: torch's import may take seconds longer on one rank
ANSWER_S = 0.6  # for an answer in a roll call; longer than SHORT_LOOK_S
NEXT_S = 0.02  # how much later the next rank asks, so that a few of many ask
LEAST_MEETING_S = 1.0  # shorter limits of a meeting count as this one: ranks never come at the same moment
LEAST_LIMIT_S = 3.0  # shorter limits of what MPI does count as this one: it must never end a job that is only slow
AFTER_LIMIT_S = 1.0  # between the limit and the end of the job

# -- tests on several ranks (testing) ----------------------------------------------------------------------------------

ALONE_S = _scaled(20.0, least_s=2.0)  # a rank has failed in a test, and the others have not come: until the job ends
STACKS_S = 2.0  # for the ranks to say where they are; one that holds the interpreter lock cannot
COLLECTION_S = _scaled(180.0)  # for ranks that have collected their tests: imports on many ranks, few cores and a cold disk
FAREWELL_S = _scaled(15.0, least_s=3.0)  # for ranks at the end of a session, until the job is aborted
SUMMARY_S = 20.0  # for pytest's summary of a job that is about to end
EXIT_LIMIT_S = 60  # for the end of the interpreter and MPI_Finalize, after which a test run has nothing to lose

# -- the death of a rank, and the end of a job (_mpi, _launch) -------------------------------------------------

DEATHS_S = 0.1  # a death is noticed within some 20 ms, of the second rank too
NOTICE_S = 1.0  # after MPI's error until the dead rank must be known; usually 1 ms
FORWARDING_S = 0.3  # for mpiexec to read the output: Hydra drops output that is still in the pipe when the job is aborted
LAST_WORDS_S = 0.2  # the same where MPI has not started: the end of a traceback was lost in 2 of 2 runs
ABORT_S = 5.0  # of MPI_Abort, which may wait for a launcher that is gone; then this process ends by itself
MONITOR_S = 1.0  # for a monitor, which answers at once; it may have been killed
CONNECT_S = 5.0  # for a connection to the supervisor, which a firewall may forbid; the program runs anyway
OTHER_RANKS_S = 5.0  # srun -K and mpirun end all ranks when one fails, and the first one must print before that
PARENT_S = 1.0  # for mp.spawn, torchrun to see the rank that failed first, before the others end
SETTLE_S = 2.0  # mpiexec ends a job within milliseconds of a failure; the time lets it print what the ranks wrote
STOP_S = 5.0  # between SIGTERM and SIGKILL; a program may have something to save
KILL_S = 1.0  # between the SIGKILL to the ranks and the one to mpiexec
GONE_S = 2.0  # a process that gets SIGKILL ends within milliseconds, but a large one frees its memory first
LAST_REPORTS_S = 1.0  # reports of ranks that ended before mpiexec may still be on their way from other hosts
LEFT_BEHIND_S = _scaled(10.0, least_s=2.0)  # an mpiexec ends milliseconds after its last rank, if the machine is not busy
FIRST_PAUSE_S, LONGEST_PAUSE_S = _scaled(1.0), _scaled(60.0)  # before a restart; each pause is twice the one before
