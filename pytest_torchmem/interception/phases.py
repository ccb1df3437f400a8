"""The ledger's phase, and its stream, as operators come; nothing of the engine is replaced."""

from __future__ import annotations

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.interception.streams import Streams
from pytest_torchmem.profile.timeline import Phase
from pytest_torchmem.step.phases import StepPhases
from pytest_torchmem.torch_private.tensors.autograd import current_graph_task


class Phases:
    """Finds the phase that an operator belongs to, from the task that the autograd engine is at."""

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
        """Enter the phase that an operator issued now belongs to, and return it."""
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
            self._ledger.begin_step()

    def enter_optimizer(self) -> None:
        """Begin an optimizer's step."""
        self._follow_engine()
        self._begin(Phase.OPTIMIZER, current_graph_task())
        self._enter()

    def leave_optimizer(self) -> None:
        """End an optimizer's step."""
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
