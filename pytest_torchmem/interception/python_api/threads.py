"""Threads that a traced program starts, which are in the trace too."""

import _thread
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from pytest_torchmem.interception.lasting import Functions, instead_of
from pytest_torchmem.step.imports import ThreadApart
from pytest_torchmem.step.trees import tensors_in

_RUN = "run"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Threads(Functions):
    """Runs threads and submitted calls of the trace's threads inside of the trace."""

    @instead_of(threading.Thread)
    def start(self, original: Any, thread: threading.Thread) -> None:
        """Start a thread that runs in the trace."""
        if self._trace.off() or isinstance(thread, ThreadApart):
            original(thread)
            return
        attributes = vars(thread)
        own = attributes.get(_RUN)
        run = self._in_trace(thread.run)

        def once() -> None:
            give_back()
            run()

        def give_back() -> None:
            attributes.pop(_RUN, None)
            if own is not None:
                attributes[_RUN] = own

        attributes[_RUN] = once
        try:
            original(thread)
        except BaseException:
            give_back()
            raise

    @instead_of(_thread, "start_new_thread")
    def start_bare(self, original: Any, function: Callable[..., Any], *args: Any) -> int:
        """Start a thread that has no object."""
        if not self._trace.off():
            function = self._in_trace(function)
        number: int = original(function, *args)
        return number

    @instead_of(ThreadPoolExecutor)
    def submit(
        self,
        original: Any,
        pool: ThreadPoolExecutor,
        function: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Future[Any]:
        """Have a thread of a pool, which may be there since before the trace, run a call in it."""
        if not self._trace.off():
            function = self._in_trace(function)
        made: Future[Any] = original(pool, function, *args, **kwargs)
        return made

    @instead_of(queue.Queue)
    def put(
        self, original: Any, to: queue.Queue[Any], item: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Take note of tensors that a thread which is there since before the trace hands over."""
        if not self._trace.on_thread():
            for tensor in tensors_in(item):
                if type(tensor) in _PLAIN and tensor.layout is torch.strided:
                    storage = tensor.untyped_storage()
                    self._trace.handed[storage._cdata] = storage
        original(to, item, *args, **kwargs)

    def _in_trace(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_run, self._trace.joined_by_new(), function)


def _run(joined: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    with joined():
        return function(*args, **kwargs)
