"""Private functions of torch that a trace, or a measured step, replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_torchmem.torch_private.names import private, private_if_imported
from pytest_torchmem.torch_private.patches import Replaceable

#: What optimizers and ``clip_grad_norm_`` sort tensors by.
group_tensors = Replaceable("torch._C._group_tensors_by_device_and_dtype")
#: What reads the arguments of ``Module.to``.
parse_to = Replaceable("torch._C._nn._parse_to")
#: Whether recurrent modules lay their weights in one piece.
flatten_weights = Replaceable("torch._use_cudnn_rnn_flatten_weight")
#: What C++ calls before it makes its first tensor on cuda.
lazy_init = Replaceable("torch.cuda._lazy_init")
#: ``torch.backends.cuda.can_use_flash_attention`` and its like, by the name of the implementation.
can_use_attention = {
    "cudnn": Replaceable("torch._C._can_use_cudnn_attention"),
    "flash": Replaceable("torch._C._can_use_flash_attention"),
    "mem_efficient": Replaceable("torch._C._can_use_mem_efficient_attention"),
}
make_wrapper = Replaceable("torch.Tensor._make_wrapper_subclass")
#: What moves and converts the parameters of a module.
apply_to_module = Replaceable("torch.nn.Module._apply")
#: A loader with workers: how it begins, and how the next batch arrives.
begin_loading = Replaceable("torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__")
next_batch = Replaceable("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data")
pin_memory: Callable[[Any], Any] = private("torch.utils.data._utils.pin_memory.pin_memory")
#: What holds the parameters of one ``fully_shard``.
sharded_parameters = private_if_imported(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
)
#: Every run of the autograd engine that Python starts goes through it (autograd/graph.py).
engine = Replaceable("torch.autograd.Variable._execution_engine")
