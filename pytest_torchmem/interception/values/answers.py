"""Answers to a program that asks for values: known ones, a guess, or an error."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytest_torchmem.errors import UnknownValueError
from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import Ledger, StorageRecord
from pytest_torchmem.interception.values.assumptions import UnknownNumber
from pytest_torchmem.interception.values.contents import Assumption, Contents
from pytest_torchmem.interception.values.messages import Mailbox
from pytest_torchmem.interception.values.policy import Values, ValuesNeeded, is_count
from pytest_torchmem.interception.values.random_numbers import RandomNumbers
from pytest_torchmem.step.generators import ForwardDraws

#: Initialisers draw again what fell out of bounds (``_no_grad_trunc_normal_``); a trace counts
#: every first draw as accepted.
_INITIALISERS = torch.nn.init.__file__

#: What ``torch.distributions`` is given counts as valid.
_VALIDATION = tuple(
    os.path.join(os.path.dirname(torch.__file__), "distributions", name)
    for name in ("constraints.py", "distribution.py")
)

#: Observers ask whether the smallest value is larger than the largest, which ends the program
#: (``check_min_max_valid``).
_OBSERVERS = os.path.join(os.path.dirname(torch.__file__), "ao", "quantization", "utils.py")
_BOUNDS_IN_ORDER = "check_min_max_valid"

#: ``SyncBatchNorm`` leaves out the statistics of processes whose batch is empty.
_STATISTICS = os.path.join(os.path.dirname(torch.nn.__file__), "modules", "_functions.py")

#: Bytes up to which what stands in for unknown values has an element for each of theirs.
_LARGEST_STAND_IN = 1 << 26

#: Where values come from that nothing computes.
_ORIGIN = (
    "it was computed from tensors on meta or from memory that nobody has written to (torch.empty), "
    "or a launched kernel wrote it. "
)

#: How often one line may ask for what is not known and get the same answer.
_LARGEST_GUESSES = 1_000


class Answers:
    """Answers what a program asks of values, and remembers what was assumed."""

    def __init__(self, ledger: Ledger, attribution: Attribution, mode: Values) -> None:
        self.contents = Contents(ledger)
        self.mode = mode
        self.needed = False
        """Whether the program's way depended on a value that this pass does not compute."""
        self.mailbox: Mailbox | None = None
        """What other processes have sent, in a world of several."""
        self.keeps_all = False
        """Whether elements counted as kept of which values would say it."""
        self.misses = ""
        """Of tensors that the program came with and whose values are not known: what they are, and
        what to do."""
        self.forward_draws = ForwardDraws()
        """What forwards with dropout drew from, for their backwards."""
        self._budget = mode.budget()
        self._failed = ""
        """The first operator whose values could not be computed, and why."""
        self._told: dict[str, None] = {}
        self._evenly = ""
        """The line that counted unknown values, and nobody asked for the counts."""
        self._guesses: dict[str, int] = {}
        self._ledger = ledger
        self._attribution = attribution
        warn = partial(_warn, self._told, attribution)  # not this object's, which holds it
        self._random_numbers = RandomNumbers(mode, warn, attribution.user_line)

    @property
    def warnings(self) -> list[str]:
        """What was assumed of unknown values, with the line, in order."""
        return list(self._told)

    @property
    def known_are(self) -> str:
        """Which values were computed, as profiles say it."""
        if self.keeps_all:
            return "guessed"
        if not self.mode.computes:
            return "none"
        spent = self._budget is not None and self._budget.spent
        return "in part" if spent else "real"

    def item(self, tensor: Tensor, record: StorageRecord) -> Any:
        """Return the number of a tensor of one element, for C++ or a program that needs it now."""
        if self.contents.known(record) is not None:
            self._told_known(record)
            return self.contents.value(record, tensor).item()
        if tensor.dtype is torch.bool:
            return self._truth(record)
        assumed = self.contents.assumed(record)
        if assumed is not None:
            return self._position(tensor, assumed)
        what = f"read an unknown value of a {tensor.dtype} tensor"
        if is_count(tensor.dtype):
            raise self.unknown(what)
        self.tell(what, "unknown values are treated as 1")
        return 1.0

    def number(self, tensor: Tensor) -> UnknownNumber:
        """Return what stands for a number that is not known, where a program may just tell it."""
        integer = is_count(tensor.dtype)
        self.warn(
            f"read an unknown value of a {tensor.dtype} tensor; it is treated as 1, and printed as "
            + ("?" if integer else "nan")
        )
        return UnknownNumber(1.0, self._undecided, integer=integer)

    def _undecided(self, what: str, answer: Any) -> Any:
        """Answer a decision on an unknown number; there is none for ``None``."""
        if answer is None or self.mode is not Values.GUESSED:
            raise self.unknown(what)
        return answer

    def stand_in(self, tensor: Tensor, record: StorageRecord, what: str) -> Tensor:
        """Return a real tensor for one whose values a program takes out of torch.

        What is not known is 1, and a position that was found is 0. Raises ``UnknownValueError`` for
        other integers: they are sizes often enough.
        """
        if self.contents.known(record) is not None:
            self._told_known(record)
            return self.contents.value(record, tensor)
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assumed = self.contents.assumed(record)
        number: float = 1 if assumed is None else assumed.answer
        if assumed is None and is_count(tensor.dtype):
            raise self.unknown(what)
        self.tell(what, f"unknown values are treated as {number}")
        one = torch.full((), number, dtype=tensor.dtype)
        if tensor.numel() * tensor.element_size() > _LARGEST_STAND_IN:
            return one.expand(tensor.shape)
        return one.repeat(tensor.shape) if tensor.dim() else one

    def _truth(self, record: StorageRecord) -> bool:
        """Return what an unknown truth value counts as."""
        assumed = self.contents.assumed(record) or Assumption.GUESSED_TRUE
        if not assumed.guessed:
            return bool(assumed.answer)
        initialiser = self._attribution.asking_frame(_INITIALISERS)
        if initialiser is not None:
            if not _accepts_all(initialiser.f_locals):
                self._random_numbers.lose("an initialiser that draws again what it rejects")
            return False
        if any(self._attribution.asking_frame(name) is not None for name in _VALIDATION):
            return True
        observer = self._attribution.asking_frame(_OBSERVERS)
        if observer is not None and observer.f_code.co_name == _BOUNDS_IN_ORDER:
            return False
        answer = bool(assumed.answer)
        self.guess(
            "comparison with an unknown value",
            f"unknown values are treated as 1, so the result is {answer}",
        )
        return answer

    def every_process_has_a_batch(self) -> bool:
        """Return whether a mask is asked for of the processes that have one: all of them."""
        return self._attribution.asking_frame(_STATISTICS) is not None

    def _position(self, tensor: Tensor, assumed: Assumption) -> int:
        self.guess(
            f"read an unknown position from a {tensor.dtype} tensor",
            f"unknown positions are treated as {assumed.answer}",
        )
        return int(assumed.answer)

    def guess(self, what: str, assumed: str) -> None:
        """Take a decision by a guess where that is wanted, and warn of it.

        Ends a loop that would wait for another answer for ever. Raises ``UnknownValueError`` where
        guesses are not wanted.
        """
        if self.mode is not Values.GUESSED:
            raise self.unknown(what)
        self.warn(f"{what}; {assumed}")
        line = self._attribution.user_line()
        times = self._guesses[line] = self._guesses.get(line, 0) + 1
        if times > _LARGEST_GUESSES:
            raise self.unknown(
                f"the same unknown value was read {_LARGEST_GUESSES:,} times here; a loop is "
                "probably waiting for it to change"
            )

    def cut(self) -> None:
        """Begin to count guesses, and what is computed, anew: another test begins."""
        self._budget = self.mode.budget()
        self._guesses.clear()
        self._told.clear()
        self._evenly = ""

    def keep_all(self, what: str) -> None:
        """Let all elements count as kept where values would say which are, and warn of that.

        Raises ``UnknownValueError`` where guesses are not wanted.
        """
        others = self.mailbox is not None and self.mailbox.needed() is not None
        if not self.mode.may_warn or self._has_another_pass() or others:
            raise self.unknown(what)
        self.warn(
            f"{what}; every element counts as kept, so the memory is at most what is reported"
        )
        self.keeps_all = True

    def tell(self, what: str, assumed: str) -> None:
        """Warn of numbers that were made up and go on into the program.

        Raises ``UnknownValueError`` where nobody would read the warning: tests that are run on a
        GPU that stands between traces have no profile.
        """
        if not self.mode.may_warn or self._has_another_pass():
            raise self.unknown(what)
        what = f"{what}; {assumed}"
        self.warn(f"{what} ({self._failed})" if self._failed else what)

    def warn(self, what: str) -> None:
        """Let the profile warn of something, with the line of the program."""
        _warn(self._told, self._attribution, what)

    def took_counts_for_even(self) -> None:
        """Take note that values which are not known are taken to be spread evenly over bins."""
        self._evenly = self._evenly or self._attribution.user_line() or "the traced program"

    def _has_another_pass(self) -> bool:
        """Return whether a pass may follow that computes more."""
        spent = self._budget is not None and bool(self._budget.spent)
        return self.mode is Values.ASKED_FOR and (spent or self._random_numbers.left_out)

    def _told_known(self, record: StorageRecord) -> None:
        """Warn of what was made up of known values, now that they are asked for."""
        if self._evenly:
            self._told.setdefault(
                f"{self._evenly}: unknown values are counted; they are taken to be spread evenly"
            )
            self._evenly = ""
        line = self.contents.of_others([record])
        if line:
            self._told.setdefault(
                f"{line}: what other processes have is not known; they are taken to have, and to "
                "send, what this one has and sends"
            )

    def unknown(self, what: str) -> BaseException:
        """Return the error for a value that the trace does not have, naming the user's line.

        In a pass that does not compute values but may be followed by one that does, it is what ends
        the pass.
        """
        missing = None if self.mailbox is None else self.mailbox.needed()
        if missing is not None:
            return missing
        line = self._attribution.user_line() or "the traced program"
        if self._has_another_pass():
            self.needed = True
            return ValuesNeeded(f"{line}: {what}")
        return UnknownValueError(
            f"{line}: {what}. This line needs a value that the trace does not have: {self._why()}"
        )

    def _why(self) -> str:
        spent = self._budget.spent if self._budget is not None else ""
        if self.mode.stands and (spent or not (self.misses or self._failed)):
            spent = spent or "uses what was made before it, beyond that budget"
            ways_out = (
                "Run it with --torchmem-values=real, which computes all, or make it smaller"
                if self.mode is Values.OF_SUITE
                else "Make it smaller, compute this on the CPU, where values are real, or do it in "
                "the body of a memory test with values='real'"
            )
            return (
                "what fixtures and tests do on a fake GPU outside of memory tests is computed as "
                f"far as a budget for each test goes, and this test {spent}. {ways_out}"
            )
        if self.mode is Values.GUESSED:
            return (
                "with values='none' it only has the values of small integer and boolean tensors "
                "(token ids, masks, lengths) that are neither random nor computed from parameters. "
                "Trace with values='auto' or values='real', or skip this line while tracing"
            )
        if spent:
            return (
                f"to compute the values of this program {spent}. Pass values='real', "
                "which computes every value for real whatever it takes, or trace a smaller model, "
                "or pass values='none', which guesses: unknown values count as 1"
            )
        if self.misses and not self._failed:
            return (
                f"it was computed from what {self.misses}, or pass values='none', which "
                "guesses: unknown values count as 1"
            )
        why = f"{self._failed}. " if self._failed else _ORIGIN
        return f"{why}Pass tensors that have values, or skip this line while tracing"


def _accepts_all(variables: Mapping[str, Any]) -> bool:
    """Return whether an initialiser draws a normal distribution whose bounds nothing exceeds.

    What ``normal_`` makes of uniform numbers of 53 bits is within 8.6 standard deviations.
    """
    mean, std, least, most = (variables.get(name) for name in ("mean", "std", "a", "b"))
    if mean is None or std is None or least is None or most is None:
        return False
    return bool(min(most - mean, mean - least) > 8.6 * std)


def _warn(told: dict[str, None], attribution: Attribution, what: str) -> None:
    line = attribution.user_line() or "the traced program"
    told.setdefault(f"{line}: {what}")
