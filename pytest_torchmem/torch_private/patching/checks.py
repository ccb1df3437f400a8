"""``torch._check`` without what it imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_torchmem.torch_private.patching.patches import Replaceable, replaced_all

_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_check_with = Replaceable("torch._check_with")


@contextmanager
def plain_checks() -> Iterator[None]:
    """Have torch's own shape functions check numbers without what they check symbols with.

    ``torch._check`` imports that, and sympy with it, when it is first asked (torch/__init__.py,
    ``_check_with``), which takes a quarter of a second.
    """
    if _SYMBOLS in sys.modules:
        yield
        return
    original = _check_with.original

    def check(error_type: Any, cond: Any, message: Any) -> None:
        if cond is not True:
            original(error_type, cond, message)

    with replaced_all([_check_with.by(check)]):
        yield
