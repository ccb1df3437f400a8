"""Which thread, phase and CUDA stream an operator belongs to, and what autograd's engine does.

Threads of a trace take turns: an operator runs from beginning to end before one of another thread
does, so that the ledger, and the plan of an operator that is made of others, have one order. What
belongs to a thread while it has its turn is put aside for the next.

Outside of a backward the stream is the one that the program chose. The autograd engine runs every
node on the stream that was current when its forward ran (torch/csrc/autograd/engine.cpp,
``evaluate_function``; input_metadata.h), and adds gradients up on that of the node that they go to
(input_buffer.cpp, ``InputBuffer::add``). While the program never leaves the default stream, none is
looked for.

Of the nodes that are ready the engine runs the one of the largest sequence number (engine.cpp,
``CompareNodeTaskTime``), which each thread counts for itself (ATen/SequenceNumber.cpp). On a GPU a
backward runs on the engine's thread of that GPU, which counts the nodes that it makes with
``create_graph=True``; a trace's backward runs on the program's thread. So before a backward of such
a graph, each node gets the number that it would have had.

The engine sums gradients in place: ``InputBuffer::accumulate``
(torch/csrc/autograd/input_buffer.cpp) adds a second gradient into the first where nobody else holds
it. It counts references to find out, and a tensor that Python has held counts one more, so under a
trace the engine always adds out of place. Such an addition is recognised here, and the interceptor
hands back the first gradient as the sum.
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import DeviceLedger, Ledger, StorageRecord
from pytest_torchmem.operators.workspace import is_dense
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.step import StepPhases
from pytest_torchmem.torch_private import dispatcher, keys
from pytest_torchmem.torch_private import tensors as private
from pytest_torchmem.torch_private.tensors import current_graph_task, current_node, node_number

_PATIENCE = 10.0
"""Seconds that the end of a trace waits for an operator that another thread is at."""
_OUTLIVED: set[int] = set()
"""Threads that outlived their trace and have not run an operator since."""


class TraceThreads:
    """Which threads are in a trace, and whose turn it is."""

    def __init__(self) -> None:
        self.last = get_ident()
        """The thread that had the last turn."""
        self.locks: dict[int, Any] = {self.last: dispatcher.turns()}
        """What each thread of the trace holds during its turn.

        It is the same for all but for those that were started within an operator, which may be
        waited for there.
        """
        self.were_one = True
        """Whether no other thread was ever in the trace."""
        self.when_leaving: list[Callable[[], object]] = []
        """Called by a thread at its end, in a turn of its own."""
        self._joined: dict[int, Any] = {}
        """The same of those that were started in it and have not ended, whether or not it is on."""
        self._parts: list[Any] = []
        self._states: dict[int, list[list[Any]]] = {}
        self._process = os.getpid()
        self._over = False
        self._held: Any = None

    # -- who is in the trace -----------------------------------------------------------------------

    def on_thread(self) -> bool:
        thread = get_ident()
        return thread in self.locks or self.adopt(thread) is not None

    def adopt(self, thread: int) -> Any:
        """Take a thread of C++ in that torch handed its own state on to; return its lock, or None.
        The autograd engine runs deeply nested backwards on one (torch/csrc/autograd/engine.cpp,
        ``ReadyQueue``, ``MAX_DEPTH``).
        """
        if not self._over and thread in self._joined:  # it was there when this was last on
            _OUTLIVED.discard(thread)
            dispatcher.join_all()
            self.were_one = False
            return self.locks.setdefault(thread, self._joined[thread])
        if self._over or thread in _OUTLIVED or not keys.is_included(keys.FAKE):
            return None
        self.were_one = False
        return self.locks.setdefault(thread, dispatcher.turns())

    def lock_for_new(self) -> Any:
        """Return the lock of a thread that the present one starts."""
        own = self.locks[get_ident()]
        return threading.RLock() if own._is_owned() else own

    @contextmanager
    def joined(self, lock: Any) -> Iterator[None]:
        """Let the present thread be in the trace, unless it is already."""
        thread = get_ident()
        if self._over or thread in self.locks:
            yield
            return
        self.were_one = False
        self.locks[thread] = self._joined[thread] = lock
        _OUTLIVED.discard(thread)
        dispatcher.join_all()
        try:
            yield
        finally:
            with self.turn():
                if thread in self.locks:
                    for call in self.when_leaving:
                        call()
                for kept in (self.locks, self._joined, self._states):
                    kept.pop(thread, None)
            _OUTLIVED.discard(thread)
            dispatcher.leave_all()

    # -- whose turn it is --------------------------------------------------------------------------

    def swap(self, *parts: Any) -> None:
        """Let the state of parts be put aside when another thread has its turn: the attributes of
        their ``per_thread``, with what makes those of a new thread.
        """
        self._parts.extend(parts)

    def begin_turn(self) -> Any:
        """Wait until no other thread of the trace is at an operator, and let none begin one.
        Returns the lock whose release ends the turn.
        """
        thread = get_ident()
        lock = self.locks.get(thread) or self.adopt(thread) or threading.RLock()
        lock.acquire()
        if thread != self.last and thread in self.locks:
            self.switch(thread)
        return lock

    @contextmanager
    def turn(self) -> Iterator[None]:
        lock = self.begin_turn()
        try:
            yield
        finally:
            lock.release()

    def switch(self, thread: int) -> bool:
        """Put the last thread's state aside for that of ``thread``; False if there is no trace."""
        if self._over:
            return False
        self._states[self.last] = [
            [getattr(part, name) for name in part.per_thread] for part in self._parts
        ]
        states = self._states.get(thread)
        for position, part in enumerate(self._parts):
            fresh = part.per_thread
            values = states[position] if states else [make() for make in fresh.values()]
            for name, value in zip(fresh, values, strict=True):
                setattr(part, name, value)
        self.last = thread
        return True

    # -- the beginning and the end -----------------------------------------------------------------

    def begin(self) -> None:
        """Let the present thread be in the trace; those that were started in it come back."""
        self.last = get_ident()
        self.locks = {self.last: dispatcher.turns()}
        self._over = False

    def close(self) -> None:
        """Let no other thread book anything any more: what was booked is about to be read."""
        with self.turn():
            self._over = True

    def end(self) -> None:
        """Let no thread be in the trace any more; those that go on wait until ``released``."""
        if os.getpid() == self._process:
            held = dispatcher.turns()
            self._held = held if held.acquire(timeout=_PATIENCE) else None
            if self._held is not None and self.last != get_ident():
                self.switch(get_ident())  # what begins again goes on with its own state
            _OUTLIVED.update(thread for thread in self.locks if thread != get_ident())
        self._over, self.last = True, -1
        self.locks.clear()

    def released(self) -> None:
        """Let threads that outlived the trace go on."""
        if self._held is not None:
            self._held.release()
            self._held = None


class EngineOrder(threading.local):
    """Which nodes backwards on a GPU have made, and where the engine has them among the others."""

    def __init__(self) -> None:
        self._first = private.sequence_number()
        self._starts: list[int] = []
        """The first node of each backward that made any."""
        self._made = [0]
        """How many nodes the backwards had made before the first and after each."""
        self._creates = False
        """Whether any backward was asked for a graph of its own."""

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs the engine's ``run_backward``; one in a backward is a part of that."""
        if current_graph_task() != -1:
            return run

        def run_backward(*args: Any, **more: Any) -> Any:
            # tensors, gradients, keep_graph, create_graph (python_engine.cpp,
            # THPEngine_run_backward)
            roots = [one.grad_fn if isinstance(one, Tensor) else one.node for one in args[0]]
            if self._creates:
                first = [one for one in roots if one is not None]
                seen, waiting = set(first), first
                while waiting:
                    node = waiting.pop()
                    private.place_node(node, self._place)
                    new = {one for one, _ in node.next_functions if one is not None} - seen
                    seen |= new
                    waiting += new
            self._creates = self._creates or bool(args[3])
            # Several roots get one of their own on the program's thread (Engine::execute).
            start = private.sequence_number() + (len(roots) > 1)
            return private.run_engine(partial(run, *args, **more), partial(self._note, start))

        return run_backward

    def _note(self, start: int) -> None:
        """Take note of the nodes from ``start`` on, which a backward has made."""
        end = private.sequence_number()
        if end > start:
            self._made.append(self._made[-1] + end - start)
            self._starts.append(start)

    def _place(self, number: int) -> int:
        """Return the number that a node would have had, counted by the thread that makes it."""
        backward = bisect_right(self._starts, number)
        if backward == 0:
            return number
        made, before = self._made[backward], self._made[backward - 1]
        position = number - self._starts[backward - 1]
        return number - made if position >= made - before else self._first + before + position


SUM = "aten::add.Tensor"
"""The operator that the engine adds gradients up with, maybe in place."""


class References(NamedTuple):
    """Who holds a tensor: Python objects, the C++ side of it, and its storage."""

    python: int
    tensor: int
    storage: int

    @classmethod
    def to(cls, tensor: Tensor, python: int) -> "References":
        """Count them now; ``python`` is ``sys.getrefcount`` where the interceptor stands."""
        of_storage = private.storage_use_count(private.storage_address(tensor))
        return cls(python, private.tensor_use_count(tensor), of_storage)


class GradientSums:
    """Tells the engine's own additions that it would do in place.

    ``alone`` is what ``References`` gives for a gradient that nobody but the engine holds; it
    depends on the interpreter, so it is learned from a program where that is known to be so. While
    it is None, the first addition is only looked at.
    """

    def __init__(self, alone: References | None) -> None:
        self.alone = alone
        self.seen: References | None = None
        self._node_number = -1
        self._node_began = 0
        self.per_thread = {"_node_number": lambda: -1, "_node_began": lambda: 0}

    def operator_in_backward(self, booked: int) -> int:
        """Note which node is running, and how many storages had been booked when it began. Returns
        the node's sequence number, -1 where there is none.
        """
        node = current_node()
        number = node_number(node)
        if number != self._node_number:
            self._node_number = number
            self._node_began = booked
        return number

    def in_place(self, first: Tensor, second: Tensor, record: StorageRecord, python: int) -> bool:
        """Return whether the engine would really do ``first.add_(second)``. ``python`` is
        ``sys.getrefcount(first)`` where the interceptor stands.
        """
        if self.alone is None:
            self.seen = self.seen or References.to(first, python)
            return False
        if torch.is_grad_enabled() or python > self.alone.python:
            return False
        if first.shape != second.shape or not is_dense(first):
            return False
        held = References.to(first, python)
        if held.tensor > self.alone.tensor or held.storage > self.alone.storage:
            return False
        return self.is_sum(record)

    def is_sum(self, record: StorageRecord) -> bool:
        """Return whether what the engine adds to was there before the running node began."""
        if record.index <= self._node_began:
            return True
        node = current_node()
        targets = [edge for edge in node.next_functions if edge[0] is not None] if node else []
        return len(set(targets)) < len(targets)  # as both gradients of ``y * y`` go to one place


#: Streams of one priority, which are handed out in turn (c10/cuda/CUDAStream.cpp).
POOL = 32
_PRIORITIES = 4
_COMING = -2
"""The task of a backward that has come to no operator yet."""


class Streams:
    """The current stream of one device, written to its ledger."""

    def __init__(self, ledger: DeviceLedger) -> None:
        self.several = False
        """Whether the program ever chose another stream than the default one."""
        self._ledger = ledger
        self._handed_out = [0] * _PRIORITIES
        self._numbers: list[int] = []
        self._chosen: list[int] = []
        """The streams that became current, and the sequence numbers of nodes from then on."""
        self._program = 0
        """What is current outside of the backward that runs."""
        self._running: tuple[int, int | None] | None = None
        """The graph task and the node that were running when last looked."""
        self._producer = 0
        """The stream of the last node that was not a leaf's."""
        self.per_thread: Mapping[str, Callable[[], Any]] = {
            "_numbers": list,
            "_chosen": list,
            "_program": int,
            "_running": lambda: None,
            "_producer": int,
        }

    def new(self, priority: int = 0) -> int:
        """Return the number of the next stream of a priority; ``getStreamFromPool``."""
        kind = min(max(-priority, 0), _PRIORITIES - 1)
        number = self._handed_out[kind] % POOL
        self._handed_out[kind] += 1
        return number << 5 | (kind + 1) << 1 | 1

    @property
    def current(self) -> int:
        """The stream that a request made now would belong to; 0 is the default one."""
        if self.several:
            self.find()
        return self._ledger.stream

    def choose(self, stream: int) -> None:
        """Make a stream current, until another is chosen or the running node is done."""
        self.several = self.several or stream != 0
        if self.several:
            self.find()
            self._enter(stream)

    def cut(self) -> None:
        """Forget on which streams nodes were made: what is left of them belongs to nobody."""
        self._numbers.clear()
        self._chosen.clear()

    def find(self) -> None:
        task = current_graph_task()
        if task == -1:
            if self._running is not None:
                self._running = None
                self._enter(self._program)
            return
        if self._running is None:
            self._program = self._producer = self._ledger.stream
        node = current_node()
        number = node_number(node)
        if self._running != (task, number):
            self._running = (task, number)
            # A leaf's node is made where the leaf is used first, whose gradient comes last.
            if number != private.LEAF_NUMBER:
                self._producer = self._of(number)
            self._enter(self._producer)

    def enter_sum(self, shape: torch.Size) -> None:
        """Let the stream be current on which the engine adds up gradients of ``shape``. They go to
        one of the nodes after the one that has just run.
        """
        node = current_node()
        edges: tuple[tuple[Any, int], ...] = node.next_functions if node is not None else ()
        for target, position in edges:
            if target is None or tuple(private.node_inputs(target)[position].shape) != tuple(shape):
                continue
            number = node_number(target)
            if number != private.LEAF_NUMBER:
                self._enter(self._of(number))
            break
        self._running = (current_graph_task(), None)

    def _of(self, number: int) -> int:
        """Return the stream that was current when the node of a sequence number was made."""
        position = bisect_right(self._numbers, number) - 1
        return self._chosen[position] if position >= 0 else 0

    def _enter(self, stream: int) -> None:
        self._ledger.stream = stream
        if not self._chosen or self._chosen[-1] != stream:
            self._numbers.append(private.sequence_number())
            self._chosen.append(stream)


class Phases:
    """The phase that an operator belongs to. A backward begins where Python asks the autograd
    engine for one, or, where a C++ extension does, with its first operator; it ends when the engine
    is seen at another task.
    """

    def __init__(
        self, ledger: Ledger, attribution: Attribution, streams: tuple[Streams, ...]
    ) -> None:
        self._ledger = ledger
        self._streams = streams
        self._attribution = attribution
        self._step = StepPhases()
        self._entered = self._step.phase
        self._tasks: list[int] = [-1]
        """The engine's task that the step, and then each phase in it that is running, belongs to;
        -1 for none."""
        self._task = -1
        """The last of them."""
        self._own: list[Phase] = []
        """The phases that are running."""
        self.per_thread = {"_tasks": lambda: [-1], "_task": lambda: -1, "_own": list}
        """A thread goes through phases of its own, and is otherwise in those of the step."""
        self._calls = 0
        """Calls of outermost modules when last looked."""

    def find(self) -> Phase:
        for streams in self._streams:
            if streams.several:
                streams.find()
        calls = self._attribution.outermost_calls
        if calls != self._calls or current_graph_task() != self._task:
            self._follow_engine()
            if calls != self._calls:
                self._calls = calls
                self._step.module_called()
                self._ledger.note_call(self._attribution.outermost_module)
            self._enter()
        return self._ledger.phase

    def begin_step(self) -> None:
        """Begin the forward of another step, after one without a backward too."""
        self._follow_engine()
        self._calls = self._attribution.outermost_calls
        self._step.module_called()
        if not self._enter():
            self._ledger.enter(self._ledger.phase)  # again

    def enter_backward(self) -> None:
        """Begin a backward that Python starts; it ends as any other does."""
        self.find()
        self._begin(Phase.BACKWARD, _COMING)
        self._enter()

    def enter_optimizer(self) -> None:
        self._follow_engine()
        self._begin(Phase.OPTIMIZER, current_graph_task())
        self._enter()

    def leave_optimizer(self) -> None:
        self._follow_engine()
        self._end()
        self._calls = self._attribution.outermost_calls
        self._enter()

    def leave(self) -> None:
        """End what a thread began that is at its own end."""
        while self._own:
            self._end()
        self._enter()

    def _follow_engine(self) -> None:
        """Begin and end backwards, which the engine does without a word."""
        task = current_graph_task()
        if self._task == _COMING and task not in (-1, self._tasks[-2]):
            self._tasks[-1] = self._task = task
            self._attribution.note_backward()
        while self._task != task and (task == -1 or self._own[-1:] == [Phase.BACKWARD]):
            self._end()
        if self._task != task:
            self._attribution.note_backward()
            self._begin(Phase.BACKWARD, task)

    def _begin(self, phase: Phase, task: int) -> None:
        self._step.begin(phase)
        self._own.append(phase)
        self._tasks.append(task)
        self._task = task

    def _end(self) -> None:
        if len(self._tasks) > 1:
            self._step.end(self._own.pop())
            self._tasks.pop()
            self._task = self._tasks[-1]

    def _enter(self) -> bool:
        """Enter the present phase, and tell whether it is another one."""
        phase = self._step.phase
        if phase is self._entered:
            return False
        self._entered = phase
        self._ledger.enter(phase)
        return True
