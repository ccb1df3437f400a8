"""The hooks that ``conftest.py`` files and other plugins can implement.

Once, before the first test: ``pytest_torchmem_register_gpus`` and
``pytest_torchmem_register_operators``. For each check and device, in this order:
``pytest_torchmem_profile``, then ``pytest_torchmem_compare`` where there is a snapshot entry. And
once, when the run ends and before any report is written, ``pytest_torchmem_report``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from pytest_torchmem.operators.custom_operators import OperatorModel
    from pytest_torchmem.profile.profile import MemoryProfile
    from pytest_torchmem.snapshots.compare import Comparison
    from pytest_torchmem.snapshots.format import Entry
    from pytest_torchmem.targets.gpus import Gpu


@pytest.hookspec()
def pytest_torchmem_register_gpus(config: pytest.Config) -> Iterable[Gpu] | None:
    """Return GPUs that fake cuda can stand for in this run, besides those it knows.

    Asked before options are read, so ``--torchmem-gpu`` can name one. ``conftest.py`` files below
    the rootdir's and those of the directories named on the command line are asked after collection.
    """


@pytest.hookspec()
def pytest_torchmem_register_operators(config: pytest.Config) -> Iterable[OperatorModel] | None:
    """Return descriptions of operators: the geometry of their outputs, their workspace.

    Asked after collection, before the first test runs; in each process that runs tests, and in the
    controller of those.
    """


@pytest.hookspec()
def pytest_torchmem_profile(item: pytest.Item, name: str, profile: MemoryProfile) -> None:
    """A target was traced on one device; ``name`` is the check's, empty where it has none.

    Called before the profile is judged, in the process that runs the test.
    """


@pytest.hookspec(firstresult=True)
def pytest_torchmem_compare(
    item: pytest.Item, before: Entry, now: Entry, comparison: Comparison
) -> Comparison | None:
    """A profile was compared with its snapshot entry; return another comparison to replace it.

    The first implementation that returns one wins; ``None`` leaves the decision to the next.
    """


@pytest.hookspec()
def pytest_torchmem_report(config: pytest.Config, report: dict[str, Any]) -> None:
    """All checks are done; ``report`` is what the JSON report will hold.

    Called once, in the process that writes the files (with xdist: the controller). Keys added
    under ``report["extra"]`` are written too.
    """


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
        if self._config.hook.pytest_torchmem_register_gpus.get_hookimpls():
            from pytest_torchmem.targets.gpus import Gpu, register_gpu

            self._ask(_GPUS, Gpu, register_gpu)

    def operators(self) -> None:
        """Add what plugins that have not been asked say of operators."""
        if self._config.hook.pytest_torchmem_register_operators.get_hookimpls():
            from pytest_torchmem.operators.custom_operators import OperatorModel, register_operator

            self._ask(_OPERATORS, OperatorModel, register_operator)

    def _ask(self, name: str, kind: type[T], register: Callable[[T], Callable[[], None]]) -> None:
        from pytest_torchmem.errors import UsageError  # every run imports this module

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
            for answer in answers:
                if not isinstance(answer, Iterable) or isinstance(answer, str):
                    raise pytest.UsageError(f"{where} returned {answer!r}: return a list")
                for value in answer:
                    try:
                        if not isinstance(value, kind):
                            raise UsageError(f"{value!r} is not a pytest_torchmem.{kind.__name__}")
                        self._config.add_cleanup(register(value))
                    except UsageError as error:
                        raise pytest.UsageError(f"{where}: {error}") from None
