"""Process groups of NCCL, for builds of torch that have none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from pytest_torchmem.torch_private.names import private_if_imported, private_name_if_imported
from pytest_torchmem.torch_private.patches import Replacements

_C10D = "torch.distributed.distributed_c10d"
_fake_group = private_if_imported("torch._C._distributed_c10d.FakeProcessGroup")
_CREATE = private_name_if_imported("torch._C._distributed_c10d.FakeProcessGroup._create_internal")
_is_built = private_if_imported(f"{_C10D}._NCCL_AVAILABLE")
_TIMEOUT = timedelta(minutes=10)
"""torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp, kProcessGroupNCCLDefaultTimeout."""


def nccl_groups(off: Callable[[], bool]) -> tuple[Replacements, dict[Any, dict[str, Any]]]:
    """Let ``init_process_group("nccl")`` make torch's fake process group, unless ``off()``.

    Returns what is replaced, and what modules get that do not have it: builds for the CPU lack
    ``ProcessGroupNCCL``.
    """
    c10d, distributed = sys.modules.get(_C10D), sys.modules.get("torch.distributed")
    fake: Any = _fake_group()
    if c10d is None or distributed is None or fake is None or _is_built() is None:
        return [], {}
    original: Any = getattr(c10d, "ProcessGroupNCCL", None)
    kind = _group_class(fake, original, off)
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (c10d, {"_NCCL_AVAILABLE": True, "default_pg_nccl_timeout": _TIMEOUT}),
        (fake, {"_set_sequence_number_for_group": lambda group: None}),
    ]
    groups: dict[str, Any] = {"ProcessGroupNCCL": kind}
    if original is None:
        return replaced, {c10d: groups, distributed: groups}
    return [*replaced, (c10d, groups), (distributed, groups)], {}


def _group_class(fake: Any, original: Any, off: Callable[[], bool]) -> Any:
    """Return what stands for ``ProcessGroupNCCL``."""
    kinds = (fake,) if original is None else (fake, original)

    class Kind(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, kinds)

        def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            if original is not None and off():
                return original(store, rank, size, *args, **kwargs)
            return getattr(fake, _CREATE, fake)(rank, size, fake.Options())

    class Options(fake.Options):  # type: ignore[misc]
        """``ProcessGroupNCCL.Options``, with which nothing is done."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__()
            self.is_high_priority_stream = is_high_priority_stream

    return Kind(
        "ProcessGroupNCCL", (), {"Options": Options if original is None else original.Options}
    )
