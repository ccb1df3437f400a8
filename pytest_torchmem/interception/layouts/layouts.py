"""Operators on tensors that are not strided: nested ones and sparse ones.

All are made of strided tensors, and what runs on those comes to the interceptor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_torchmem.interception.layouts.nested import NestedTensors, has_nested
from pytest_torchmem.interception.layouts.sparse import (
    KnownTensors,
    has_compressed,
    run_compressed,
    run_sparse,
)
from pytest_torchmem.interception.layouts.values import SparseValues
from pytest_torchmem.interception.ledger import DeviceLedger
from pytest_torchmem.interception.parts import Intercepts, Parts
from pytest_torchmem.interception.values.memory import LIMIT_NESTED
from pytest_torchmem.operators.registry import Kind
from pytest_torchmem.operators.spec import OperatorSpec
from pytest_torchmem.operators.workspace import Workspace


class Layouts:
    """Runs the operators that take or make such tensors."""

    def __init__(self, interceptor: Intercepts, parts: Parts) -> None:
        self._interceptor = interceptor
        self._target = parts.target
        self._values = parts.values
        self._sparse_values = SparseValues(parts.ledger, parts.values)
        self._placement = parts.placement
        self._known = KnownTensors(parts.ledger, parts.values)
        self._nested = NestedTensors(parts.target, parts.ledger, parts.values)

    def device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DeviceLedger:
        """Return where an operator runs with these arguments."""
        return self._nested.device_of(args, kwargs)

    def find(
        self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """Return what runs an operator with these arguments, ``None`` where all are strided."""
        if operator.kind is Kind.NESTED or has_nested(args, kwargs):
            return self.run_nested
        if operator.kind is Kind.COMPRESSED or has_compressed(args, kwargs):
            return self.run_compressed
        return None

    def run_nested(
        self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that takes or makes nested tensors."""
        __tracebackhide__ = True
        placement, values = self._placement, self._values
        where, placement.nested = placement.nested, self._nested.device_of(args, kwargs)
        limit, values.limit = values.limit, LIMIT_NESTED
        try:
            with self._interceptor.intercepting():
                return self._nested.run(operator, args, kwargs)
        finally:
            placement.nested, values.limit = where, limit

    def run_sparse(
        self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that takes sparse COO tensors."""
        __tracebackhide__ = True
        return self._run_parts(run_sparse, operator, args, kwargs)

    def run_compressed(
        self, operator: OperatorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that takes or makes compressed sparse tensors."""
        __tracebackhide__ = True
        return self._run_parts(run_compressed, operator, args, kwargs)

    def _run_parts(
        self,
        run: Callable[..., tuple[Any, bool]],
        operator: OperatorSpec,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run an operator on the strided tensors that its sparse ones are made of."""
        __tracebackhide__ = True
        device = self._nested.device_of(args, kwargs)
        on_gpu = device.device.type == "cuda"
        real = self._sparse_values.compute(operator, args, kwargs, on_gpu=on_gpu)
        self._placement.begin_on(device)
        with self._interceptor.intercepting():
            machine = self._target.machine(device.device.type)
            result, is_whole = run(machine, self._known, operator, args, kwargs)
        self._sparse_values.keep(operator, args, kwargs, result, real)
        if not is_whole or (on_gpu and operator.record.asks_cusparse):
            device.note(Workspace(unknown=(operator.name,)))
        return result
