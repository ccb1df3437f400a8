"""Private functions of torch that a trace, or a measured step, replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_torchmem.torch_private.names import (
    private,
    private_if_imported,
    private_name_if_imported,
)
from pytest_torchmem.torch_private.patching.patches import Replaceable

#: What optimizers and ``clip_grad_norm_`` sort tensors by.
group_tensors = Replaceable("torch._C._group_tensors_by_device_and_dtype")
#: What reads the arguments of ``Module.to``.
parse_to = Replaceable("torch._C._nn._parse_to")
#: Whether recurrent modules lay their weights in one piece.
flatten_weights = Replaceable("torch._use_cudnn_rnn_flatten_weight")
#: What the compiler of TorchScript looks torch's functions up with.
find_builtin = (
    Replaceable("torch.jit._builtins._find_builtin"),
    Replaceable("torch.jit._recursive._find_builtin"),
)
#: What torch's own Python asks which accelerator there is.
accelerator = Replaceable("torch._C._get_accelerator")
#: The same, ``None`` without one (``torch.accelerator.current_accelerator``).
accelerator_or_none = Replaceable("torch._C._accelerator_getAccelerator")
#: What makes nested tensors of the strided layout.
nested_from_list = Replaceable("torch._nested_tensor_from_tensor_list")
nested_constructor = Replaceable("torch._C._nested.nested_tensor")
#: What C++ calls before it makes its first tensor on cuda.
lazy_init = Replaceable("torch.cuda._lazy_init")
#: Whether the build has CUDA, which ``torch.cuda.is_available`` and ``device_count`` ask first.
cuda_is_compiled = Replaceable("torch.cuda._is_compiled")
#: ``torch.backends.cuda.can_use_flash_attention`` and its like, by the name of the implementation.
can_use_attention = {
    "cudnn": Replaceable("torch._C._can_use_cudnn_attention"),
    "flash": Replaceable("torch._C._can_use_flash_attention"),
    "mem_efficient": Replaceable("torch._C._can_use_mem_efficient_attention"),
}
#: What calls a pointwise kernel of ``torch.cuda.jiterator``.
call_jitted = Replaceable("torch.cuda.jiterator._JittedFunction.__call__")
#: What writes the records of a file of ``torch.save``, and what reads them.
file_writer = Replaceable("torch._C.PyTorchFileWriter")
file_reader = Replaceable("torch._C.PyTorchFileReader")
#: What makes a dispatch mode the thread's innermost one, and takes it away (``with mode:``).
push_mode = Replaceable("torch.utils._python_dispatch._push_on_torch_dispatch_stack")
pop_mode = Replaceable("torch.utils._python_dispatch._pop_torch_dispatch_stack")
#: What takes a mode away for a while, by its kind, and puts it back.
unset_mode = Replaceable("torch._C._unset_dispatch_mode")
set_mode = Replaceable("torch._C._set_dispatch_mode")
#: What prints a tensor.
print_tensor = Replaceable("torch._tensor_str._str")
make_wrapper = Replaceable("torch.Tensor._make_wrapper_subclass")
#: A loader with workers: how it begins, and how the next batch arrives.
begin_loading = Replaceable("torch.utils.data.dataloader._MultiProcessingDataLoaderIter.__init__")
next_batch = Replaceable("torch.utils.data.dataloader._MultiProcessingDataLoaderIter._next_data")
pin_memory: Callable[[Any], Any] = private("torch.utils.data._utils.pin_memory.pin_memory")
#: What compares the parameters of processes.
VERIFY_PARAMETERS = private_name_if_imported("torch.distributed._verify_params_across_processes")
#: What makes the buckets of a ``DistributedDataParallel`` anew, in the order of its gradients.
REBUILD_BUCKETS = private_name_if_imported("torch.distributed.Reducer._rebuild_buckets")
#: What a stage of a pipeline knows of its tensors, and how its neighbours agree on that.
pipeline_stage = private_if_imported("torch.distributed.pipelining.stage.PipelineStage")
needs_messages = private_if_imported("torch.distributed.pipelining.stage.InferenceMode")
GIVEN_TENSORS = private_name_if_imported(
    "torch.distributed.pipelining.stage.PipelineStage._user_meta"
)
FORWARD_VOTE = private_name_if_imported(
    "torch.distributed.pipelining.stage.PipelineStage._warmup_forward_vote"
)
BACKWARD_RESULT = private_name_if_imported(
    "torch.distributed.pipelining.stage.PipelineStage._warmup_backward_result"
)
#: What ``fully_shard`` and its like made, by module.
module_states = private_if_imported("torch.distributed._composable_state._module_state_mapping")
#: What ``fully_shard`` and ``replicate`` begin with, before they move parameters to the device.
fully_sharding = private_if_imported("torch.distributed.fsdp._fully_shard._fully_shard")
replicating = private_if_imported("torch.distributed._composable.replicate_with_fsdp")
SHARDED_STATES = private_name_if_imported(
    "torch.distributed.fsdp._fully_shard._fully_shard._get_modules_and_states"
)
REPLICATED_STATES = private_name_if_imported(
    "torch.distributed._composable.replicate_with_fsdp._get_modules_and_states"
)
#: Where composable functions are; few programs import it.
CONTRACT = "torch.distributed._composable.contract"
#: Where a module holds the states of the functions that were applied to it, and their names.
state_table = private_if_imported("torch.distributed._composable.contract.STATE_KEY")
name_table = private_if_imported("torch.distributed._composable.contract.REGISTRY_KEY")
#: What stands by such a name: it is made when the function is applied.
applied_item = private_if_imported("torch.distributed._composable.contract.RegistryItem")
#: What processes agree by on who writes what of a checkpoint, and whether they write all of it.
checkpoint_agreement = private_if_imported("torch.distributed.checkpoint.utils._DistWrapper")
checkpoint_planner = private_if_imported("torch.distributed.checkpoint.default_planner")
VALIDATE_PLAN = private_name_if_imported(
    "torch.distributed.checkpoint.default_planner._validate_global_plan"
)
#: What ``fully_shard`` makes for a module.
sharding_state = private_if_imported("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState")
#: Every run of the autograd engine that Python starts goes through it (autograd/graph.py).
engine = Replaceable("torch.autograd.Variable._execution_engine")
#: What hands a storage to another process (torch/multiprocessing/reductions.py).
SHARING = (
    Replaceable("torch.UntypedStorage._share_fd_cpu_"),
    Replaceable("torch.UntypedStorage._share_filename_cpu_"),
)
#: What makes a storage of what another process handed over.
RECEIVING = (
    Replaceable("torch.UntypedStorage._new_shared_fd_cpu"),
    Replaceable("torch.UntypedStorage._new_shared_filename_cpu"),
)
#: What ``torch.manual_seed`` and its like go to.
default_generator = Replaceable("torch.random.default_generator")
#: What writes the format of ``torch.save`` before archives, and what reads its storages.
legacy_save = Replaceable("torch.serialization._legacy_save")
set_from_file = Replaceable("torch.UntypedStorage._set_from_file")
#: What exports a tensor without asking it (``Tensor.__dlpack__``).
to_dlpack = (
    Replaceable("torch._C._to_dlpack"),
    Replaceable("torch._C._to_dlpack_versioned"),
)
#: What a fake tensor answers to C++ about itself, by operator.
metadata_handlers = Replaceable("torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS")
#: What runs a kernel on zeros for a fake tensor, of an operator without one for ``meta``.
fallback_kernel = Replaceable("torch._subclasses.fake_tensor.run_fallback_kernel")
