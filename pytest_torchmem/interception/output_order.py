"""The order in which a CUDA kernel makes its outputs, where it returns them in another one.

It decides nothing but what the caching allocator makes of the requests: which blocks they get, and
with that what is reserved.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_torchmem.interception.plan import Output, Plan, Step


def steps_in_order(order: Sequence[int], plan: Plan) -> tuple[Step, ...]:
    """Return the steps of a plan for its kernel's order; none where that is the outputs' own."""
    outputs = [plan.outputs[position] for position in order]
    if any(type(output) is not Output or plan.slots[output.slot] < 0 for output in outputs):
        return ()
    return tuple(outputs)
