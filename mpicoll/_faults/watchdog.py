"""Looks at the operations under way, and ends the job if one of them cannot end.

    every second     compares the calls of the ranks of this node (call_comparison.py); if they differ, the job ends. Looks at
                     the ranks that a call waits for; if the program or the process of one has ended, or an exception has left
                     its call half done, the job ends
    after 1 second   that a call waits: asks ranks of other nodes what they have done last (inquiries.py)
    after 3 seconds  that a thread waits, in a call or for a Work: a line on stderr names the ranks that have not come
    at the timeout   of the group, an asynchronous operation fails with OperationTimeout, whoever waits for it and however;
                     for a blocking call the job ends; both name the same ranks

A thread that waits inside MPI cannot be interrupted, so that no exception can be raised in it. As with torch's NCCL watchdog,
another thread looks on, says what waits and where the program is, and aborts the job. Barriers have a limit of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial

from mpicoll._base import facts, last_words, log, waits
from mpicoll._base.group_errors import GroupDestroyed, OperationTimeout
from mpicoll._base.waits import ASK_AFTER_S, BLOCKED_S, LOOK_S, MOST_PATIENCE_S, PATIENCE_S, SHORT_LOOK_S, STACK_S
from mpicoll._faults import culprits, inquiries, questions, stacks
from mpicoll._faults.call_comparison import Ledger, Mismatch
from mpicoll._faults.group_state import EVERYBODY, GroupState, UnderWay
from mpicoll._faults.inquiries import Absent, Position
from mpicoll._faults.late_ranks import POLLS
from mpicoll._faults.questions import DISMISSED, SHOW, WHERE, Answer, Question
from mpicoll._faults.under_way import table
from mpicoll._faults.watch import watch
from mpicoll._mpi import abort, errors, runtime, survivors

MOST_SHOWN = 2  # ranks that show where they are, beside the one that ends the job
MOST_MESSAGES = 8  # under way, on a board
MOST_BEFORE = 4  # ranks for which another one waits before it ends the job
REMEMBERED = 4096  # groups that this rank has left, about which it can still be asked

_attempt = partial(runtime.attempt, SHORT_LOOK_S)  # a thread may hang in MPI while it holds the lock


class Watchdog:
    """Looks at all operations under way, from the first group to the last one. The only instance is ``watchdog``."""

    def __init__(self) -> None:
        self._look_s = 0.0  # between two looks; 0: it does not look
        self._second = 0.0  # of the last look at the ledgers
        self.ended: dict[str, tuple[int, str]] = {}  #: Collectives and `ending` of groups that this rank has left, by name.
        self._asked = 0  # rounds of questions to ranks of this node; a rank asks one after the other

    def watch(self, timeout_s: float) -> None:
        """Looks from now on, and often enough for this timeout."""
        starts = not self._look_s
        self._look_s = min(self._look_s or LOOK_S, max(0.05, timeout_s / 10), SHORT_LOOK_S if survivors.possible() else LOOK_S)
        if starts or self in watch.timers:  # otherwise it looks now
            self._set_timer()

    def leave(self, group: GroupState) -> None:
        """Tells the other ranks that this one has left the group."""
        self.ended[group.name] = group.line.started, group.ending
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]
        if group.ledger is not None:
            group.ledger.leave(group)
            self.write(group.ledger)

    def write(self, ledger: Ledger | None) -> None:
        """Writes the board of this rank now."""
        if ledger is not None:
            ledger.write([each for each in list(table.groups) if each.ledger is ledger])

    def mismatch(self, group: GroupState, number: int) -> str:
        """Returns in what the calls of this node's ranks differ at this place of the order; empty if they are alike or unknown.

        Waits until all ranks of the node have written theirs.
        """
        ledger, deadline, found = group.ledger, time.monotonic() + STACK_S, dict[int, facts.Facts]()
        if ledger is None:
            return ""
        self.write(ledger)
        while time.monotonic() < deadline and len(found) < sum(rank in ledger.boards.ranks for rank in group.global_ranks):
            time.sleep(0.01)
            found = ledger.calls(group, number)
        known = {rank: call for rank, call in found.items() if call.operation != facts.UNKNOWN}
        return facts.mismatch(known) if len(set(known.values())) > 1 else ""

    def stop(self, answers: bool = False) -> None:
        """Looks no more, after the last group of a world. What this rank has called stays on its board.

        ``answers``: goes on, and tells ranks of other nodes that wait for this one that it has left.
        """
        for ledger in {group.ledger for group in list(table.groups)}:
            self.write(ledger)
        self._look_s = LOOK_S if answers and self._look_s else 0.0
        if not answers:
            watch.timers.pop(self, None)
            watch.stop()

    def _set_timer(self) -> None:
        # All ranks of a node look at the ledger at the same moment: at each full second of the clock that they share.
        watch.after(min(self._look_s, LOOK_S - time.monotonic() % LOOK_S), self, self.look)

    def look(self) -> None:
        """Looks once at all groups, operations and boards."""
        if not self._look_s:
            return
        try:
            if groups := list(table.groups):
                self._look(groups)
            elif not runtime.finalized():  # the world has ended, and ranks of other nodes may still ask about it
                questions.serve(WHERE, self._answer)
        finally:
            self._set_timer()

    def _look(self, groups: list[GroupState]) -> None:
        now = time.monotonic()
        if survivors.possible():
            runtime.entering()
            _end_lost(groups)
        waiting = table.operations()
        self._heed(_attempt(self._exchange, groups, waiting) or [], groups, waiting)
        if last_words.monitored() is not None:
            last_words.doing(table.in_words(), table.blocking)
        if now // LOOK_S != self._second:
            self._second = now // LOOK_S
            self._read_ledgers(groups, [each for each in waiting if each.peer != EVERYBODY and now - each.since > BLOCKED_S])
        for each in waiting:
            waited_s, limit_s = now - each.since, each.group.timeout_s
            if each.operation in POLLS:
                continue
            if each.work is not None:
                if each.work.overdue(now):
                    _expire(each)
            elif waited_s > limit_s + each.group.checked * waits.ANSWER_OF_FIRST_S:  # a check raises at the limit
                limit = f"{each.operation} exceeded the group's timeout of {limit_s:g} s"
                after = f"no end after {waited_s:.1f} s"
                _end(each, f"{after}. {culprits.named(each)}", limit, culprits.of(each), after)
        blocked = [each for each in waiting if now - each.since > BLOCKED_S and each.group.size > 1]
        for each in blocked:
            self._look_at_peers(each, now)

    def _read_ledgers(self, groups: list[GroupState], messages: list[UnderWay]) -> None:
        """Writes and compares what the ranks of this node have called. Ends the job if their calls differ."""
        peers = [(each.since, -1 if each.rank is None or each.group.spans else each.rank) for each in messages]
        for ledger in {group.ledger for group in groups if group.ledger is not None}:
            sharing = [group for group in groups if group.ledger is ledger]
            ledger.messages = peers[-MOST_MESSAGES:]
            ledger.write(sharing)
            if ledger.boards.asked():
                _show_stacks(sharing[0], "another rank asks where this one is")
            for group, mismatch in ledger.compare(sharing) if ledger.compares else ():
                _end_mismatch(group, mismatch)

    def _look_at_peers(self, waiting: UnderWay, now: float) -> None:
        """Ends the job if a rank that this call waits for will never come. Otherwise says who has not come.

        The lowest rank that waits says it; for a message, the lowest one of each node, of those that began at about that time.
        It waits twice as long before it says the same of the group's next operation.
        """
        group, absent = waiting.group, culprits.of(waiting)
        since = waiting.since if waiting.work is None else waiting.work.awaited  # a thread may wait since then
        waited_s = 0.0 if since is None else now - max(since, waiting.since)
        never = [each for each in absent if each.never]
        if never and (waiting.peer is not None or never == absent) and not survivors.possible():
            absent.sort(key=lambda each: not each.never)
            _give_up(waiting, culprits.named(waiting), absent)
            return
        wait = waiting.operation, waiting.since
        if not (absent or group.spans) or group.named == wait or waited_s < group.patience_s:
            return
        own, missing = group.global_ranks[group.rank], {each.rank for each in absent}
        others = {} if waiting.peer == EVERYBODY else culprits.also_waiting(group, waiting.since)
        if others and min(others) < own:
            return  # until that rank waits no more
        group.named, group.patience_s = wait, min(2 * group.patience_s, MOST_PATIENCE_S)
        lowest = next((rank for rank in group.global_ranks if rank not in missing), None)
        if waiting.peer != EVERYBODY or group.ledger is None or lowest == own:
            said = f"{group.where(waiting.operation)} has waited for {waited_s:.0f} s. {culprits.named(waiting)}"
            log.say(f"{said}{culprits.in_words(others)}")

    def _exchange(self, groups: Sequence[GroupState], waiting: Sequence[UnderWay]) -> list[tuple[int, Answer]]:
        """Answers other ranks, and asks them. Returns their answers, with their ranks.

        Calls nothing of MPI in a job on one node in which no rank waits.
        """
        elsewhere = any(group.unseen for group in groups)
        if not (elsewhere or waiting) or not questions.possible():
            return []
        runtime.entering()
        if elsewhere:
            questions.serve(WHERE, self._answer)
        self._ask(waiting)
        return questions.answers(WHERE)

    def _answer(self, source: int, question: Question) -> Answer | None:
        """Answers another rank."""
        if question.kind == WHERE:
            name, number = question.about
            return question.answered(inquiries.own_position(list(table.groups), name, number, self.ended))
        for group in [group for group in list(table.groups) if question.kind == SHOW and group.name == question.about[0]]:
            _show_stacks(group, "another rank asks where this one is")
        return None

    def _heed(self, answers: Sequence[tuple[int, Answer]], groups: Sequence[GroupState], waiting: Sequence[UnderWay]) -> None:
        """Ends the job, or the rank that has answered, if a call waits for a rank that will begin no more, or calls differ."""
        for rank, answer in answers:
            position: Position = answer.value
            asking = [group for group in groups if inquiries.heard(group, rank, answer)]
            for each in waiting if position.left else ():
                group, peer = each.group, each.peer
                if group not in asking or rank not in group.global_ranks:
                    continue
                never = position.begun < group.line.started if peer == EVERYBODY else peer == group.global_ranks.index(rank)
                if never or (peer is None and group.size == 2):
                    if survivors.possible():
                        _attempt(questions.ask, [rank], Question(DISMISSED))  # so that the others get PeerLost
                    else:
                        what = last_words.about(rank, f"waits for rank {rank}, {position.left}")
                        _give_up(each, what, [Absent(rank, position.words, True)])
        for each in waiting:
            _compare(each)

    def _ask(self, waiting: Sequence[UnderWay]) -> None:
        """Asks the ranks that calls wait for; of those on this node one at a time, which answer at their end at least."""
        for each in waiting:
            group, waited_s = each.group, time.monotonic() - each.since
            if group.size == 1 or group.spans or waited_s < min(ASK_AFTER_S, group.timeout_s / 4):
                continue
            own, peers = group.global_ranks[group.rank], group.global_ranks if each.rank is None else [each.rank]
            unseen = [rank for rank in group.unseen if each.rank in (None, rank)]
            if unseen:
                inquiries.ask(group, each.number, unseen)
            hidden = {*unseen, own}
            seen = [rank for rank in peers if rank not in hidden]
            if seen and waited_s > PATIENCE_S:
                start = sum(rank < own for rank in seen)  # so that not all ask the same one
                inquiries.ask(group, each.number, [seen[(start + self._asked) % len(seen)]])
        self._asked += 1


def _compare(waiting: UnderWay) -> None:
    """Ends the job if a rank has answered that it makes another call than this rank."""
    group, number = waiting.group, waiting.number
    if number in group.waits and not group.checked and group.ledger is not None and group.ledger.compares:
        own = inquiries.call(group, number)
        if own is not None and (other := inquiries.other_call(group, number, own)) is not None:
            _end_mismatch(group, Mismatch(number, other[0], (other[1], own)))


def _end_lost(groups: Sequence[GroupState]) -> None:
    """Makes the groups that have lost a rank unusable, and ends their operations with PeerLost, in a job that goes on.

    MPI itself fails collectives of such a group, and messages to the dead rank. A rank may also wait for one that lives but will
    not come, because that one has got the error first. So the watchdog of each rank revokes their communicators. It holds the
    lock for calls of MPI alone: the program's hooks may wait for a thread that needs it.
    """
    if lost := _attempt(survivors.lost) or ():
        _attempt(survivors.revoke_base)
    for group in groups if lost else ():
        gone = tuple(rank for rank in group.channel.ranks if rank in lost)
        if gone and not isinstance(group.broken, GroupDestroyed):
            group.fail(errors.peer_lost(group.where("the group"), gone))
            _attempt(group.channel.revoke)


def _expire(waiting: UnderWay, reason: str = "") -> None:
    """Fails an asynchronous operation, and the collectives queued behind it. Callbacks of their Futures run in another thread."""
    assert waiting.work is not None
    works = [waiting.work] if waiting.peer != EVERYBODY else waiting.group.queue.works()

    def expire() -> None:
        for work in works:
            work.expire(reason=reason)

    threading.Thread(target=expire, name="mpicoll expiry", daemon=True).start()


def _show_stacks(group: GroupState, what: str) -> None:
    stacks.show(f"rank {group.global_ranks[group.rank]} (group {group.name!r}): {what}")


def _give_up(waiting: UnderWay, what: str, absent: Sequence[Absent]) -> None:
    """Fails what can never end. For a thread that is inside MPI the job ends."""
    group = waiting.group
    if waiting.work is not None:
        _expire(waiting, f"it can never end: {what}")
    elif group.reconfigurable:
        group.fail(OperationTimeout(f"{group.where(waiting.operation)}: it can never end: {what}"))
    else:
        _end(waiting, what, f"{waiting.operation} can never end", absent)


def _end(waiting: UnderWay, what: str, reason: str, absent: Sequence[Absent], after: str = "") -> None:
    """Ends the job, because of the first of ``absent``. Before that, this rank and those that run show where they are.

    Every rank that waits comes here at the same moment. The lowest one is first, and ends the others before they say the same.
    If a process has ended, mpiexec notices that as well, and is given time to end the job by itself.
    """
    group = waiting.group
    before = len({*group.global_ranks[: group.rank]} - {each.rank for each in absent})
    lead_s = waits.LEAD_S / (1 if waiting.peer == EVERYBODY else 4)  # ranks before may not wait for this message
    watch.pause(lead_s * min(before, MOST_BEFORE) + waits.SETTLE_S * any(each.ended for each in absent))
    if waiting not in table.operations():  # it has ended meanwhile, or while this thread looked
        return
    stacks.show(f"{group.where(waiting.operation)}: {what}")
    group.call_abort_hooks()
    group.expired(reason, True)
    _show_others(group, [each.rank for each in absent if not each.never])
    if not absent:
        abort.abort(reason, f"{reason}: {what}")
        return
    first, *others = absent
    verb = f"has not come to {waiting.operation}" if waiting.peer == EVERYBODY else f"is the other side of {waiting.operation}"
    here = f"On rank {group.global_ranks[group.rank]} {reason}" + (f": {after}" if after else "")
    sentences = [f"{verb}: {first.words}", culprits.described(others[:MOST_SHOWN]), here]
    abort.abort(reason, ". ".join(filter(None, sentences)), (first.rank, first.ended))


def _end_mismatch(group: GroupState, mismatch: Mismatch) -> None:
    """Ends the job, because of different calls. Many ranks may find that at the same moment; see `_end`."""
    watch.pause(waits.LEAD_S / 2 * min(max(0, group.rank - 1), MOST_BEFORE))  # on one node, rank 1 is the first that can find it
    number, other, calls = mismatch
    own, refused = group.global_ranks[group.rank], any(call.refusal for call in calls)
    values = "No tensor has changed." if refused else "Tensors may have wrong values."
    what = f"group {group.name!r}, collective number {number}: {facts.mismatch({other: calls[0], own: calls[1]})}"
    log.say(f"{what}. {values} With MPICOLL_CHECK=1 all ranks raise CollectiveMismatch before a tensor changes")
    group.expired("the ranks call different collectives", True)
    _show_stacks(group, "the calls differ")
    _show_others(group, [other])
    abort.abort("the ranks call different collectives", what)


def _show_others(group: GroupState, ranks: Sequence[int]) -> None:
    """Asks some ranks to show where they are, and gives them time for it."""
    seen = () if group.ledger is None else group.ledger.boards.ranks
    for rank in ranks[:MOST_SHOWN]:
        if rank in seen and group.ledger is not None:
            group.ledger.boards.ask(rank)
        elif _attempt(questions.possible):
            _attempt(questions.ask, [rank], Question(SHOW, (group.name, 0)))
    if ranks:
        watch.pause(STACK_S)


watchdog = Watchdog()
