"""Whether torch says that autocast is enabled, to kernels that refuse something without it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from pytest_torchmem.torch_private.names import private_name
from pytest_torchmem.torch_private.patching.patches import replaced

_ANY_ENABLED = private_name("torch._C._is_any_autocast_enabled")
_DEVICES = ("cpu", "cuda", "xpu", "mps")


def own_keys_are_no_autocast() -> AbstractContextManager[None]:
    """Return a context in which torch does not take a trace's keys, which are those of two devices,
    for autocast: at::autocast::is_autocast_enabled. An RNN refuses no input then.
    """

    def enabled() -> bool:
        return any(map(torch.is_autocast_enabled, _DEVICES))

    return replaced(cast(Any, torch)._C, **{_ANY_ENABLED: enabled})
