"""The hooks that ``conftest.py`` files and other plugins can implement.

Once, before the first test: ``pytest_torchmem_register_gpus`` and
``pytest_torchmem_register_operators``. For each check and device, in this order:
``pytest_torchmem_profile``, then ``pytest_torchmem_compare`` where there is a snapshot entry. And
once, when the run ends and before any report is written, ``pytest_torchmem_report``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
    """Return what a trace is to know of operators: their outputs' geometry, their workspace.

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
