"""What ``conftest.py`` files and plugins add to the profiler for one run: GPUs and operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pytest_torchmem.errors import UsageError

_GPUS = "pytest_torchmem_register_gpus"
_OPERATORS = "pytest_torchmem_register_operators"


class Registrations:
    """Asks every plugin once, and takes everything back when the run ends.

    ``conftest.py`` files of subdirectories come to be known in the course of collection: whoever
    was not there to be asked the first time is asked the next.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._asked: dict[str, list[object]] = {_GPUS: [], _OPERATORS: []}

    def gpus(self) -> None:
        """Add the GPUs of plugins that have not been asked; needs no torch."""

        def register(gpu: object) -> Callable[[], None]:
            from pytest_torchmem.targets.gpus import Gpu, register_gpu

            if not isinstance(gpu, Gpu):
                raise UsageError(f"{gpu!r} is not a pytest_torchmem.Gpu")
            return register_gpu(gpu)

        self._ask(_GPUS, register)

    def operators(self) -> None:
        """Add what plugins that have not been asked say of operators."""

        def register(model: object) -> Callable[[], None]:
            from pytest_torchmem.operators.custom_operators import OperatorModel, register_operator

            if not isinstance(model, OperatorModel):
                raise UsageError(f"{model!r} is not a pytest_torchmem.OperatorModel")
            return register_operator(model)

        self._ask(_OPERATORS, register)

    def _ask(self, name: str, register: Callable[[object], Callable[[], None]]) -> None:
        manager = self._config.pluginmanager
        asked = self._asked[name]
        implementing = [call.plugin for call in getattr(manager.hook, name).get_hookimpls()]
        for plugin in implementing:
            if any(plugin is known for known in asked):
                continue
            asked.append(plugin)
            others = [other for other in implementing if other is not plugin]
            answers = manager.subset_hook_caller(name, others)(config=self._config)
            for answer in answers:
                self._take(name, plugin, answer, register)

    def _take(
        self,
        name: str,
        plugin: object,
        answer: Any,
        register: Callable[[object], Callable[[], None]],
    ) -> None:
        where = f"torchmem: the hook {name} of {self._config.pluginmanager.get_name(plugin)}"
        if not isinstance(answer, Iterable) or isinstance(answer, str):
            raise pytest.UsageError(f"{where} returned {answer!r}: return a list")
        for value in answer:
            try:
                self._config.add_cleanup(register(value))
            except UsageError as error:
                raise pytest.UsageError(f"{where}: {error}") from None
