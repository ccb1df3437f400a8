"""What all tests share."""

from __future__ import annotations

import gc

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True, scope="module")
def _collections_leave_out_what_is_imported() -> None:
    """Leave what is alive before a module's tests out of every later collection of garbage.

    A measurement collects several times, and the objects of torch's modules and of torch's samples
    of its operators are a third of a second each time.
    """
    gc.collect()
    gc.freeze()
