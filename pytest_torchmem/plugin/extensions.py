"""What ``conftest.py`` files and plugins add to the profiler for one run: GPUs and operators."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

from pytest_torchmem.errors import UsageError

T = TypeVar("T")
_GPUS = "pytest_torchmem_register_gpus"
_OPERATORS = "pytest_torchmem_register_operators"


class PluginRegistrations:
    """Asks every plugin once, and takes everything back when the run ends.

    ``conftest.py`` files of subdirectories come to be known in the course of collection: whoever
    was not there to be asked the first time is asked the next.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._asked: dict[str, list[object]] = {_GPUS: [], _OPERATORS: []}

    def gpus(self) -> None:
        """Add the GPUs of plugins that have not been asked; needs no torch."""
        from pytest_torchmem.targets.gpus import Gpu, register_gpu

        self._ask(_GPUS, Gpu, register_gpu)

    def operators(self) -> None:
        """Add what plugins that have not been asked say of operators."""
        from pytest_torchmem.operators.custom_operators import OperatorModel, register_operator

        self._ask(_OPERATORS, OperatorModel, register_operator)

    def _ask(self, name: str, kind: type[T], register: Callable[[T], Callable[[], None]]) -> None:
        manager = self._config.pluginmanager
        asked = self._asked[name]
        implementing = [call.plugin for call in getattr(manager.hook, name).get_hookimpls()]
        for plugin in implementing:
            if any(plugin is known for known in asked):
                continue
            asked.append(plugin)
            others = [other for other in implementing if other is not plugin]
            answers = manager.subset_hook_caller(name, others)(config=self._config)
            where = f"torchmem: the hook {name} of {manager.get_name(plugin)}"
            for value in (value for answer in answers for value in _values(answer, where)):
                try:
                    if not isinstance(value, kind):
                        raise UsageError(f"{value!r} is not a pytest_torchmem.{kind.__name__}")
                    self._config.add_cleanup(register(value))
                except UsageError as error:
                    raise pytest.UsageError(f"{where}: {error}") from None


def _values(answer: object, where: str) -> Iterable[object]:
    if not isinstance(answer, Iterable) or isinstance(answer, str):
        raise pytest.UsageError(f"{where} returned {answer!r}: return a list")
    return answer
