"""The order in which a CUDA kernel makes its outputs, where it returns them in another one.

It decides nothing but what the caching allocator makes of the requests: which blocks they get, and
with that what is reserved.
"""

from __future__ import annotations

from pytest_torchmem.interception.plan import Output, Plan, Step

#: Positions of the outputs by operator, the first made first; files of aten/src/ATen/native.
_ORDERS = {
    "aten::native_dropout": (1, 0),  # cuda/Dropout.cu, dropout_cuda: the mask first
    "aten::_thnn_fused_gru_cell": (1, 0),  # cuda/RNN.cu: the workspace first
    "aten::_thnn_fused_lstm_cell": (2, 0, 1),
    "aten::_embedding_bag": (2, 1, 0, 3),  # cuda/EmbeddingBag.cu: the bags' sizes first
    "aten::_embedding_bag_forward_only": (2, 1, 0, 3),
}


def steps_in_order(operator: str, plan: Plan) -> tuple[Step, ...]:
    """Return the steps of a plan for its kernel's order; none where that is the outputs' own."""
    outputs = [plan.outputs[position] for position in _ORDERS.get(operator, ())]
    if any(type(output) is not Output or plan.slots[output.slot] < 0 for output in outputs):
        return ()
    return tuple(outputs)
