"""The passes of a trace: a program is run again where its way depends on more than a pass knew."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pytest_torchmem.errors import PassEnded, UnknownValueError, add_note
from pytest_torchmem.interception.conversion import forget_cached
from pytest_torchmem.interception.values import messages as mail
from pytest_torchmem.interception.values.contents import Values, ValuesNeeded
from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.targets.target import Selected, Target

Run = Callable[[Target, Values, mail.Mailbox | None], MemoryProfile]
"""Runs one pass."""
_Ended = MemoryProfile | ValuesNeeded | mail.MessageNeeded | mail.MessageSent


def run_passes(
    run: Run,
    machine: Target,
    passes: tuple[Values, ...],
    restore: Callable[[], None],
    lowering: "Lowering",
) -> MemoryProfile:
    """Return the profile of the first pass that comes to its end. One that ended because of what
    Inductor made of its graphs is followed by one without.
    """
    alone = machine.world is None or machine.world.size == 1
    passes = (*passes, passes[-1])
    for place, one in enumerate(passes, start=1):
        is_last = place >= len(passes) - 1
        if place == len(passes) and not lowering.reason:
            break
        if not alone:
            ended = _in_world(run, machine, one, restore)
        elif is_last and not lowering.is_open:
            try:
                return run(machine, one, None)
            except ValuesNeeded as end:
                if place == len(passes) or not lowering.reason:
                    raise
                ended = end.with_traceback(None)
        else:
            ended = _attempt(partial(run, machine, one, None), restore)
        if isinstance(ended, MemoryProfile):
            return ended
    assert isinstance(ended, ValuesNeeded)
    raise ended  # the last pass has no other after it, and says what it lacks


def _in_world(run: Run, machine: Target, values: Values, restore: Callable[[], None]) -> _Ended:
    """Run a pass of one rank, after the ranks whose messages or files it asks for."""
    messages: mail.Messages = {}
    awaited: list[mail.Message] = []
    failure = ""
    asked: set[int] = set()
    """Processes that were traced before: they have more to say than one message."""
    own = machine.world.rank if machine.world else 0
    while True:
        message = awaited[-1] if awaited else None
        rank = own if message is None else message.source
        process = machine if message is None else _as_rank(machine, rank)
        of_file = message is not None and message.kind in mail.OF_FILES
        awaiting = message if of_file or rank not in asked else None
        make = partial(mail.Mailbox, messages, rank, awaiting, looks=message is None)
        try:
            one_pass = partial(_run_with, run, process, values, make)
            ended = _attempt(one_pass, restore, for_profile=message is None)
        except BaseException as error:
            if of_file and message is not None and isinstance(error, Exception):
                messages[message] = (mail.is_there(message),)
                awaited.pop()
                continue  # the program may be content without
            if mail.lacks_file(error) and own and message in (None, mail.FILES):
                add_note(
                    error,
                    f"(rank {own} is traced, and rank 0 before it, which has not written the file: "
                    "have it there before the trace)",
                )
            elif message is not None:
                what = "writes to files" if message is mail.FILES else "sends to others"
                add_note(error, f"(rank {rank} was traced for what it {what})")
            raise
        if message is mail.FILES and isinstance(ended, MemoryProfile):
            messages[mail.FILES] = ()
        elif of_file and message is not None and isinstance(ended, MemoryProfile):
            messages[message] = (mail.is_there(message),)
        if isinstance(ended, ValuesNeeded):
            return ended
        if message in messages:  # what it needs from then on, it may be sent later
            asked.add(rank)
            awaited.pop()
        elif isinstance(ended, mail.MessageNeeded):
            if ended.message in awaited:
                raise mail.never_sent(
                    ended.message, "it waits for another that waits for it", failure
                )
            awaited.append(ended.message)
            failure = ended.failure or failure
        elif message is None:
            return ended
        else:
            raise mail.never_sent(message, "it comes to its end without it", failure)


def _run_with(
    run: Run, machine: Target, values: Values, mailbox: Callable[[], mail.Mailbox]
) -> MemoryProfile:
    """Run a pass; where it fails for want of other ranks' messages, end it to run those first.

    That is a file that rank 0 writes, or what was sent: C++ reads that without an operator, and
    fails of what is not there (the state of a generator).
    """
    box = mailbox()
    try:
        return run(machine, values, box)
    except PassEnded:
        raise
    except BaseException as error:
        lacks = mail.lacks_file(error)
        needed = box.needed_after(lacks) if lacks or isinstance(error, Exception) else None
        if needed is None:
            raise
        needed.failure = f"{type(error).__name__}: {error}"
        raise needed from error


def _as_rank(machine: Target, rank: int) -> Target:
    """Return the machine as another process of its world sees it."""
    assert machine.world is not None
    world = machine.world._replace(rank=rank)
    return replace(machine, world=world, selected=Selected(world.local_rank))


def _attempt(
    run: Callable[[], MemoryProfile], restore: Callable[[], None], *, for_profile: bool = True
) -> _Ended:
    """Run a pass of a program that may have to be run again, as if for the first time. So it always
    has to unless it is run ``for_profile``. Returns why, where it has to.
    """
    ended: _Ended
    try:
        ended = run()
    except (ValuesNeeded, mail.MessageNeeded, mail.MessageSent) as end:
        ended = end.with_traceback(None)
        ended.__context__ = ended.__cause__ = None
    if not (for_profile and isinstance(ended, MemoryProfile)):
        restore()
        forget_cached()
    return ended


_BY_VALUES = "the program decides by values, which Inductor's kernels do not compute here"


class Lowering:
    """What the passes of a trace have found out; the next one runs graphs operator by operator."""

    def __init__(self, reason: str = "") -> None:
        self.used = False
        """Whether a pass has lowered graphs."""
        self.reason = reason
        """Why graphs are not lowered any more."""
        self._failed = ""

    @property
    def is_open(self) -> bool:
        """Whether the next pass may end because of what it lowers."""
        return self.used and not self.reason

    def failed(self, why: str) -> None:
        """Take note of a backward that cannot be lowered: its forward has run already."""
        self._failed = self._failed or why

    def ends_by(self, error: BaseException) -> bool:
        """Return whether lowering ended a pass, so that one without lowering can follow."""
        if not self.is_open:
            return False
        by_values = isinstance(error, UnknownValueError)
        self.reason = self._failed or (_BY_VALUES if by_values else "")
        return bool(self.reason)
