"""What stands in the place of torch's functions, made once and used by one trace after another.

To make hundreds of functions takes longer than a small step. They ask a stand-in for the trace that
is running; between traces it stands for one that is over. What outlives a trace, an autograd node
or the capture of a graph, holds the trace's own context instead: ``TraceContext.itself``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, Generic, NamedTuple, TypeVar

from pytest_torchmem.interception.attribution import Attribution
from pytest_torchmem.interception.context import TraceContext
from pytest_torchmem.interception.interceptor import Interceptor
from pytest_torchmem.interception.ledger import Ledger
from pytest_torchmem.targets.host import REFERENCE
from pytest_torchmem.targets.target import Target
from pytest_torchmem.torch_private.function_holders import program_functions_aside
from pytest_torchmem.torch_private.patches import LookedAt, Patch, Replaceable, Replacements

_Owner = TypeVar("_Owner")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_PLACES = "instead_of"


def instead_of(owner: Any, *names: str) -> Callable[[_Method], _Method]:
    """Let a method of ``Functions`` stand in the place of a ``Replaceable``, or of attributes of a
    class or module, its own name if there are none.
    """

    def mark(method: _Method) -> _Method:
        places: list[Any] = vars(method).setdefault(_PLACES, [])
        if isinstance(owner, Replaceable):
            places.append(owner)
        else:
            places += [Replaceable.of(owner, name) for name in names or (method.__name__,)]
        return method

    return mark


class Functions:
    """Methods in the place of functions of torch or Python, in one trace after another.

    They are called with the function that they stand for, and with what that is called with.
    """

    def __init__(self, trace: TraceContext) -> None:
        self._trace = trace

    def replacements(self) -> Replacements:
        """Return the methods that are marked, in their places."""
        return [
            place.by(_calling(getattr(self, name), place.original))
            for name, method in vars(type(self)).items()
            for place in getattr(method, _PLACES, ())
        ]


def _calling(method: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(original, *args, **kwargs)

    return function


@dataclass(frozen=True)
class Layer(Generic[_Owner]):
    """Replacements that are put in place together."""

    replacements: Replacements
    owner: _Owner
    """What the layers above call of this one."""
    begin: Sequence[Callable[[], object]] = ()
    """Called before and after each trace: what was noted of the last one is forgotten."""
    looked_at: Sequence[LookedAt] = ()
    """What else the replacements depend on."""

    def start(self) -> None:
        """Forget what was noted."""
        for begin in self.begin:
            begin()


class _Made(NamedTuple):
    layer: Layer[Any]
    patch: Patch
    by: Callable[..., Layer[Any]]
    """The function that made it: another one where its module was imported anew."""


class _Lasting:
    """The layers that were made in this process; one trace at a time has them."""

    def __init__(self) -> None:
        self._trace: TraceContext = object.__new__(TraceContext)
        self._made: dict[str, _Made] = {}
        """By name, in the order in which they were made: each may call those before."""

    @contextmanager
    def following(self, trace: TraceContext) -> Iterator[None]:
        """Let all layers be those of a trace."""
        self._trace.__dict__ = trace.__dict__
        try:
            yield
        finally:
            if trace.was_alone():
                self._trace.__dict__ = _of_no_trace().__dict__
            else:  # a thread that goes on may be in one of the functions, which finish as they are
                self._trace, self._made = object.__new__(TraceContext), {}

    @contextmanager
    def layer(self, name: str, make: Callable[[TraceContext], Layer[_Owner]]) -> Iterator[_Owner]:
        """Have a layer in place, made with ``make(trace)`` if what it replaces is new."""
        layer, patch, _ = self._find(name, make)
        layer.start()
        try:
            patch.put_in_place()
            try:
                yield layer.owner
            finally:
                patch.put_back()
        finally:
            layer.start()

    def _find(self, name: str, make: Callable[[TraceContext], Layer[Any]]) -> _Made:
        found, by = self._made.get(name), getattr(make, "func", make)
        if found is None or found.by is not by or not found.patch.fits():
            if found is not None:
                names = [*self._made]
                for above in names[names.index(name) :]:
                    del self._made[above]
            layer = make(self._trace)
            with program_functions_aside(layer.replacements) as aside:
                if aside:  # what stands there would call the program's function, which calls it
                    layer = make(self._trace)
            patch = Patch(layer.replacements, layer.looked_at)
            found = self._made[name] = _Made(layer, patch, by)
        return found


LASTING = _Lasting()


@cache
def _of_no_trace() -> TraceContext:
    """Return the context of a trace that is over, and in which nothing ever was."""
    interceptor = Interceptor(Target(REFERENCE), Ledger(), Attribution(), None)
    interceptor.threads.end()
    interceptor.threads.released()
    return TraceContext(interceptor)
