"""Answers on disk, one file for each version of cuDNN: a line for each question and GPU.

Several processes add lines to one file. A line that cannot be read, such as the half of one that
another process is writing, counts as an answer that is not there.

cuDNN asked from a process that may hold torch: another process answers, and is asked once.

The other process is started at the first question that no earlier run has an answer for. If it
dies, another one is asked once more. What two died at has no answer in this run. Where no process
comes up, they die at one question after another, or one takes too long, nothing is asked any more.
"""

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pytest_torchmem.cudnn import driver, questions
from pytest_torchmem.cudnn.driver import device_properties

_FORMAT = 1
"""To be counted up when questions, or what is taken from cuDNN's answers, change."""

Place = tuple[str, str, str]
"""A GPU, an operator and a geometry."""


def folder() -> Path:
    """Return where answers are kept, as the XDG base directory specification has it. Raises
    ``RuntimeError`` where there is no home directory.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "pytest-torchmem"


class DiskMemory:
    """The answers of one version of cuDNN, read when the first is asked for."""

    def __init__(self, version: questions.Version) -> None:
        try:
            self._path: Path | None = (
                folder() / f"cudnn-{questions.version_text(version)}-v{_FORMAT}.jsonl"
            )
        except RuntimeError:  # there is no home directory
            self._path = None

    @cached_property
    def _found(self) -> dict[Place, questions.Answer]:
        """What is on disk, of several lines for one place the last, and what was added."""
        found: dict[Place, questions.Answer] = {}
        text = ""
        with contextlib.suppress(OSError):
            if self._path is not None:
                text = self._path.read_text(encoding="utf-8", errors="replace")
        for line in text.split("\n"):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                gpu, operator, geometry, plans, why = json.loads(line)
                found[gpu, operator, geometry] = read_answer(plans, why)
        return found

    def get(self, place: Place) -> questions.Answer | None:
        return self._found.get(place)

    def add(self, place: Place, answer: questions.Answer, on_disk: bool = True) -> None:
        """Remember an answer; where nothing can or shall be written, for this process alone."""
        self._found[place] = answer
        line = json.dumps([*place, answer.plans, answer.why], separators=(",", ":")) + "\n"
        if self._path is not None and on_disk:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("ab", buffering=0) as file:  # one write, at the end
                    file.write(line.encode())


def read_answer(plans: object, why: object) -> questions.Answer:
    """Return an answer from what JSON has of it; raises ``TypeError`` and ``ValueError``."""
    if not isinstance(plans, list) or not isinstance(why, str):
        raise TypeError("not an answer")
    return questions.Answer(tuple(_read_plan(*plan) for plan in plans), why)


def _read_plan(workspace: object, engine: object, notes: list[object]) -> questions.ExecutionPlan:
    if not isinstance(workspace, int) or not isinstance(engine, int) or workspace < 0:
        raise ValueError("not a plan")
    return questions.ExecutionPlan(workspace, engine, tuple(map(str, notes)))


PATIENCE = 120.0
"""Seconds that one question may take; cuDNN answers in milliseconds, once it is loaded."""
_ATTEMPTS = 3
_DEATHS = 8
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from pytest_torchmem.cudnn.execution_plans import main; main(*sys.argv[2:])"
)


class Library:
    """One cuDNN on this machine. Questions of several threads are asked one after the other."""

    def __init__(self, installed: questions.Installed) -> None:
        self.installed = installed
        self._memory = DiskMemory(installed.version)
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._failures = 0
        """How often no process came up."""
        self._deaths = 0
        """At how many questions in a row processes ended."""
        self._why = ""
        self._owner = os.getpid()

    def __repr__(self) -> str:
        return f"<cuDNN {questions.version_text(self.version)} at {self.installed.library}>"

    @property
    def version(self) -> questions.Version:
        """Its major, minor and patch level."""
        return self.installed.version

    def ask(
        self, capability: tuple[int, int], multiprocessors: int, question: questions.Question
    ) -> questions.Answer:
        """Return cuDNN's plans for a GPU; an answer without plans says why there are none."""
        product = _matrix_product(capability, question)
        if product is not None:
            return product
        gpu = f"{capability[0]}.{capability[1]}x{multiprocessors}"
        place = gpu, question.operator, question.geometry
        if self._owner != os.getpid():  # forked, perhaps while another thread held the lock
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock:
            known = self._memory.get(place)
            if known is not None:
                return known
            message = json.dumps([device_properties(capability, multiprocessors), question.plain()])
            # cuDNN may end its process at a question. So may others, who want its memory:
            # only what ends two processes has no answer.
            answer = self._asked(message) or self._asked(message)
            if answer is None:
                self._deaths += 1
                failed = questions.Answer(why=self._why, is_failure=True)
                self._memory.add(place, failed, on_disk=False)
                return failed
            self._deaths = 0
            # Without an answer about attention, what it needs beside cuDNN may be missing here.
            self._memory.add(
                place,
                answer,
                bool(answer.plans or isinstance(question, questions.ConvolutionQuestion)),
            )
            return answer

    def _asked(self, message: str) -> questions.Answer | None:
        """Return what the process says, or ``None`` if it says nothing; ``_why`` tells why."""
        if self._failures >= _ATTEMPTS or self._deaths >= _DEATHS:
            return None
        process = self._process
        if process is None or process.owner != os.getpid():  # after a fork it is the parent's
            try:
                process = self._process = _Process(self.installed)
            except (OSError, ValueError, _EndedError) as error:
                self._failures += 1
                self._why = f"cuDNN cannot be loaded: {error}"
                return None
        try:
            found = process.ask(message)
            answer = read_answer(found["plans"], found["why"])
        except (_EndedError, KeyError, TypeError, ValueError) as error:
            self._end_process(process)
            self._why = f"cuDNN did not answer: {error}"
            if isinstance(error, _TooSlowError):  # nobody waits for that again
                self._failures = _ATTEMPTS
            return None
        except BaseException:  # what was asked last would answer the next question
            self._end_process(process)
            raise
        return answer

    def _end_process(self, process: "_Process") -> None:
        process.close()
        self._process = None


_PLANE = 64
"""The elements of an image from which on a matrix product is cuBLASLt's: with 49 it mostly is not,
with 196 it is."""
_PRODUCT_ENGINES = {"forward": 58, "backward_input": 63, "backward_weight": 62}


def _matrix_product(
    capability: tuple[int, int], question: questions.Question
) -> questions.Answer | None:
    """Return the plan of a convolution that is a product of matrices on Hopper, None for others.

    cuDNN hands it to cuBLASLt, and lists that engine only where it finds a driver. An H100 took it
    in 322 of 337 questions, with these workspaces (cuDNN 9.19.0): gradients of the weight for each
    image in float32, which are added up then, and some hundred bytes otherwise.
    """
    if not isinstance(question, questions.ConvolutionQuestion) or capability != (9, 0):
        return None
    x, w, y = question.x, question.w, question.y
    is_product = (
        len(x.shape) == 4
        and w.shape[2:] == (1, 1)
        and w.shape[1] == x.shape[1]
        and set(question.stride) == {1}
        and not any(question.padding)
        and all(one.strides == questions.contiguous_strides(one.shape) for one in (x, w, y))
        and x.shape[2] * x.shape[3] > _PLANE
    )
    is_plain = question.added is None and not question.benchmark and not question.deterministic
    rounds = x.dtype in ("float16", "bfloat16") or (x.dtype == "float32" and question.allow_tf32)
    if not (is_product and is_plain and rounds):
        return None
    nbytes = 400 if x.dtype == "float32" else 272
    if question.direction == "backward_weight":
        nbytes = 4 * x.shape[0] * w.shape[0] * w.shape[1]
    return questions.Answer(
        (questions.ExecutionPlan(nbytes, _PRODUCT_ENGINES[question.direction]),)
    )


class _EndedError(Exception):
    """The process died, or says what is no answer."""


class _TooSlowError(_EndedError):
    """The process takes too long."""


class _Process:
    """A process with cuDNN and without torch, and a pipe to it."""

    def __init__(self, installed: questions.Installed) -> None:
        """Raise ``OSError`` and ``_EndedError`` where it does not come up."""
        if not sys.executable:
            raise OSError("the name of Python's program is not known")
        self.owner = os.getpid()
        self._rest = b""
        self._popen: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="torchmem-cudnn-")
        atexit.register(self.close)
        try:
            folder = Path(self._folder.name)
            (folder / driver.SONAME).write_bytes(driver.shared_object())
            environment = {
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("CUDNN_", "LD_", "PYTHON", "COV_"))
            }
            environment["LD_LIBRARY_PATH"] = installed.library_path(folder)
            package = str(Path(__file__).parents[2])
            # Without site-packages (-I, -S): nothing that is installed runs there.
            command = [sys.executable, "-I", "-S", "-c", _START, package, str(installed.library)]
            command.append(str(installed.frontend or ""))
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # what interrupts a run from the keyboard leaves it alone
            )
            said = self._read()
            if said.get("version") is None:
                raise _EndedError(str(said.get("error", "it said nothing")))
            if said["version"] != list(installed.version):
                named = questions.version_text(installed.version)
                raise _EndedError(f"it is {said['version']}, and named as {named}")
        except BaseException:
            self.close()
            raise

    def ask(self, message: str) -> dict[str, Any]:
        """Return the answer to one message; raises ``_EndedError``."""
        assert self._popen is not None
        stdin = self._popen.stdin
        assert stdin is not None
        try:
            stdin.write(message.encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise _EndedError(self._end(error)) from None
        return self._read()

    def close(self) -> None:
        """End the process, unless it belongs to the process that this one was forked from."""
        if self.owner != os.getpid():
            return
        atexit.unregister(self.close)
        if self._popen is not None:
            self._popen.kill()
            for pipe in (self._popen.stdin, self._popen.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._popen.wait()
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def _read(self) -> dict[str, Any]:
        assert self._popen is not None
        stdout = self._popen.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(PATIENCE):
                    raise _TooSlowError(f"it took more than {PATIENCE:.0f} seconds")
                received = os.read(stdout.fileno(), 1 << 16)
                if not received:
                    raise _EndedError(self._end(None))
                self._rest += received
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        if not isinstance(found, dict):
            raise _EndedError("it said something else")
        return found

    def _end(self, error: OSError | None) -> str:
        assert self._popen is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"its process ended with status {self._popen.wait(5)}"
        return str(error or "its pipe was closed")


def library() -> Library | str:
    """Return the cuDNN of this machine, or why there is none to ask. What is installed is looked up
    once in a process, for each value of ``TORCHMEM_CUDNN``.
    """
    return _library(os.environ.get(questions.VARIABLE, ""))


@lru_cache(maxsize=8)
def _library(named: str) -> Library | str:
    found = questions.find_installed()
    return Library(found) if isinstance(found, questions.Installed) else found
