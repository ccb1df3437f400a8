"""What would help: changes of a training step, each traced, by bytes saved and operations paid."""

from __future__ import annotations

from typing import Any

from pytest_torchmem.profile.profile import MemoryProfile
from pytest_torchmem.profile.suggestion import Suggestion
from pytest_torchmem.tracing.trace import trace


def advise(
    target: Any, *args: Any, budget: int | str | None = None, **options: Any
) -> list[Suggestion[MemoryProfile]]:
    """Return changes that lower the peak of a training step, the best first.

    The arguments are those of ``trace``, but that memory is unlimited. Every change is made while
    the step is traced again, and says what that saved: checkpoints of modules, functions in place,
    ``foreach=False`` and ``fused=True`` of the optimizer, ``set_to_none`` where gradients are set
    to zero, a cross entropy fused with its linear layer or in chunks, the forward in bfloat16
    (autocast), large buffers and conversions in a narrower type, and ``expandable_segments`` of the
    caching allocator (cuda, by what is reserved). With a ``budget`` (``"2 GiB"``) for the peak,
    as few modules are checkpointed as it takes, those of the fewest operations first, and what
    costs nothing is joined where no change is enough.

    Changes that fit the budget come first, those that cost the fewest operations before others.
    Changes that save nothing, and those that the step does not bear, are left out. Of a
    compiled step no function is put in place, and no type is changed but by autocast. Raises what
    ``trace`` raises for the step as it is, and ``UsageError`` for a ``budget`` that is no number of
    bytes.
    """
    options["memory"] = "unlimited"
    return trace(target, *args, **options).suggestions(budget)
