"""Attributes replaced for the length of a trace, and put back exactly as they were.

The private functions of torch that a trace, or a measured step, replaces stand at the end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial, wraps
from inspect import getattr_static
from itertools import repeat
from operator import attrgetter, is_
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar, TypeAlias
from weakref import getweakrefs

import torch
import torch.utils
from torch import Tensor

from pytest_torchmem.torch_private import function_holders
from pytest_torchmem.torch_private.function_holders import HOLDERS, is_left_over, is_of_program
from pytest_torchmem.torch_private.modes import of_functions, of_tensors
from pytest_torchmem.torch_private.names import (
    MissingName,
    find,
    methods_name,
    private,
    private_if_imported,
    private_name_if_imported,
    unsupported,
)

ABSENT: Any = object()
"""Stands for an attribute that is not there."""
_is_absent = partial(is_, ABSENT)

Replacements: TypeAlias = Sequence[tuple[Any, Mapping[str, Any]]]
"""Classes or modules, and their attributes by name.

A bound method among the attributes of a class becomes a method of that class: what the class is
called with follows the object that the method is bound to. Those of ``torch.Tensor`` ask its
subclasses first (``modes.py``). All must be there, but for ``Additions``.
"""


class Additions(dict[str, Any]):
    """Attributes by name that a module has for a while, whether it has them otherwise or not."""


Off: TypeAlias = Callable[[], bool]
"""Says whether torch's own is meant, as on a thread that is in no trace."""
LookedAt: TypeAlias = tuple[Mapping[str, Any], str, Any]
"""The attributes of a module or class, one of their names, and what was there, or ``ABSENT``."""


class Replaceable:
    """An attribute that is replaced: a private one of torch, by its dotted path."""

    def __init__(self, path: str) -> None:
        self._found = private(path)
        owner, _, self._name = path.rpartition(".")
        self._owner = find(owner)

    @classmethod
    def of(cls, owner: Any, name: str) -> "Replaceable":
        """Return a public one of a class or module."""
        made = cls.__new__(cls)
        made._owner, made._name, made._found = owner, name, None
        return made

    @property
    def original(self) -> Any:
        """What is there now."""
        missing = isinstance(self._found, MissingName)
        return self._found if missing else getattr(self._owner, self._name)

    def by(self, replacement: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return one of ``Replacements``; in the place of a static method is one."""
        static = isinstance(getattr_static(self._owner, self._name, None), staticmethod)
        if static and isinstance(self._owner, type):
            replacement = staticmethod(replacement)
        return self._owner, {self._name: replacement}

    def unless(self, off: Off, instead: Callable[..., Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return one that has ``instead`` called unless ``off()``."""
        return self.by(unless(off, instead, self.original))


def unless(off: Off, instead: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return what calls ``instead``, and ``original`` where ``off()``."""

    @wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if off() else instead(*args, **kwargs)

    return either


def class_unless(off: Off, instead: Callable[..., Any], original: Any, kind: type) -> Any:
    """Return the class of what calls ``instead``, which makes a ``kind``, and ``original`` where
    ``off()``; objects of both are its.
    """

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (original if off() else instead)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (original, kind))

        def __subclasscheck__(cls, subclass: Any) -> bool:
            # Of a build without CUDA torch.cuda.Stream is no subclass of torch.Stream.
            return issubclass(vars(subclass).get("in_trace", subclass), (original, kind))

    return Kind(original.__name__, (), {"__doc__": original.__doc__, "in_trace": kind})


class Instead:
    """Stands in for an object: its attributes are what a function returns for their names."""

    def __init__(self, attribute: Callable[[str], Any]) -> None:
        self._attribute = attribute

    def __getattr__(self, name: str) -> Any:
        return self._attribute(name)


class having(AbstractContextManager[None]):
    """A context in which an object of this package has other attributes."""

    __slots__ = ("_before", "_now", "_owner")

    def __init__(self, owner: Any, **now: Any) -> None:
        self._owner, self._now = owner, now

    def __enter__(self) -> None:
        self._before = {name: getattr(self._owner, name) for name in self._now}
        self._set(self._now)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            setattr(self._owner, name, value)


def replaced(owner: Any, **replacements: Any) -> AbstractContextManager[None]:
    """Replace attributes of a class or module; inherited ones are inherited again afterwards."""
    return replaced_all([(owner, replacements)])


def swaps_despite(kind: type) -> AbstractContextManager[None]:
    """Let ``torch.utils.swap_tensors`` not count weak references of a kind; it swaps no tensor that
    has others.
    """

    def others(tensor: Tensor) -> list[Any]:
        return [one for one in getweakrefs(tensor) if type(one) is not kind]

    return replaced(torch.utils, weakref=SimpleNamespace(getweakrefs=others))


@contextmanager
def replaced_all(replacements: Replacements) -> Iterator[None]:
    """Replace attributes of several classes and modules together."""
    patch = Patch(replacements)
    patch.put_in_place()
    try:
        yield
    finally:
        patch.put_back()


def _are_there(tables: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> bool:
    """Return whether names are bound to the very things that they are given with, or not at all."""
    return all(  # of hundreds, twice in every trace: without a step of Python for each
        all(map(is_, map(own.get, attributes, repeat(ABSENT)), attributes.values()))
        for own, attributes in tables
    )


class _Place:
    """A class or module, and some of its attributes by name."""

    __slots__ = ("_at_once", "before", "own", "owner", "replacements")

    def __init__(
        self, owner: Any, replacements: Mapping[str, Any], before: Mapping[str, Any]
    ) -> None:
        self.owner, self.replacements, self.before = owner, replacements, before
        self.own: Any = vars(owner)
        self._at_once = type(owner) is ModuleType and not any(map(_is_absent, before.values()))
        """Whether all can be set by an update of the module's own names."""

    def replace(self) -> None:
        if self._at_once:
            self.own.update(self.replacements)
            return
        owner = self.owner
        for name, attribute in self.replacements.items():
            setattr(owner, name, attribute)

    def put_back(self, as_replaced: bool) -> None:
        """Have there what was before; unless all is ``as_replaced``, also where not all was, and
        nowhere where a program has put something meanwhile.
        """
        owner, own, before = self.owner, self.own, self.before
        if not as_replaced:
            before = {
                name: attribute
                for name, attribute in before.items()
                if own.get(name) is self.replacements[name]
                or not is_of_program(owner, name, own.get(name))
            }
        if self._at_once:
            own.update(before)
            return
        for name, attribute in before.items():
            _bind(owner, name, attribute)


class Patch:
    """Replacements that are made once and put in the place of torch's own again and again.

    What a program has put there itself stays (``function_holders.py``). ``looked_at`` is what else
    they depend on. Raises ``UnsupportedTorchError`` for attributes that are not there, or of
    another kind.
    """

    standing: ClassVar[dict[int, "Patch"]] = {}
    """Those in place, in order; one is in place once at a time."""
    originals: ClassVar[dict[tuple[int, str], tuple[Any, Any]]] = {}
    """Owners and what was there before anything was replaced, by the owners' ids and the names."""

    def __init__(self, replacements: Replacements, looked_at: Sequence[LookedAt] = ()) -> None:
        unknown: list[str] = []
        for owner, attributes in replacements:
            if isinstance(attributes, Additions):
                continue
            called = (callable(one) or isinstance(one, classmethod) for one in attributes.values())
            unknown += _unknown(owner, (*attributes,), (*called,))
        if unknown:
            raise unsupported(f"it has no {', '.join(unknown)} that can be replaced")
        self._given: dict[int, Any] = {}
        """What replaced functions of modules stand for, by their ids."""
        self._of_modules: dict[int, tuple[Any, Any]] = {}
        self._firsts: dict[int, list[Any]] | None = None
        self._noted: dict[int, Any] | None = None
        """What stood first where these stand, by their ids: the same as long as this fits."""
        self._held: list[tuple[Any, str, Any, Any]] = []
        self._in_programs: list[tuple[function_holders.HeldOriginal, Any]] = []
        """Where functions of the program hold what they have taken the place of."""
        self._of_program: list[tuple[Any, str, Any]] = []
        """Owners, names and what a program has put there itself."""
        self._looked_at = [*looked_at]
        owners: dict[int, tuple[Any, dict[str, Any]]] = {}
        for owner, attributes in replacements:
            owners.setdefault(id(owner), (owner, {}))[1].update(attributes)
        self._places = [self._place(*one) for one in owners.values()]

    def _place(self, owner: Any, attributes: Mapping[str, Any]) -> _Place:
        own, of_module, replacements = vars(owner), isinstance(owner, ModuleType), {}
        before: dict[str, Any] = {}
        for name, replacement in attributes.items():
            found = own.get(name, ABSENT)
            is_ours = is_left_over(found)
            if isinstance(replacement, MethodType) and isinstance(owner, type):
                replacement = _unbound(replacement)
            if is_ours and not self._stands(found):
                found = _give_back(owner, name)
                is_ours = is_left_over(found)
            if is_of_program(owner, name, found):
                self._stay_beside(owner, name, found, replacement)
                continue
            if owner is Tensor:
                replacement = of_tensors(replacement, getattr(Tensor, name))
            elif of_module:
                replacement = of_functions(owner, replacement, found)
                if callable(found):
                    self._of_modules[id(found)] = found, replacement
                    self._given[id(replacement)] = found
            replacements[name], before[name] = replacement, found
            if not is_ours:
                self.originals[id(owner), name] = owner, found
        return _Place(owner, replacements, before)

    def _stay_beside(self, owner: Any, name: str, found: Any, replacement: Any) -> None:
        """Leave what a program has put there, and replace what that calls."""
        self._looked_at.append((vars(owner), name, found))
        self._of_program.append((owner, name, found))
        for place in function_holders.held_originals(found, name):
            instead = of_tensors(replacement, place.original) if owner is Tensor else replacement
            self._in_programs.append((place, instead))
            self._of_modules[id(place.original)] = place.original, instead

    def fits(self) -> bool:
        """Return whether what was there when this was made is there now."""
        if not _are_there((place.own, place.before) for place in self._places):
            return False
        return all(own.get(name, ABSENT) is found for own, name, found in self._looked_at)

    def put_in_place(self) -> None:
        """Have the replacements in place, until ``put_back``; all or none of them."""
        self._held = self._held_elsewhere()
        if self._noted is None:
            self._noted = {number: HOLDERS.original(one) for number, one in self._given.items()}
        if self._noted:
            HOLDERS.standing[id(self)] = self._noted
        self.standing[id(self)] = self
        try:
            for place in self._places:
                place.replace()
            for module, name, _, replacement in self._held:
                vars(module)[name] = replacement
            for held, replacement in self._in_programs:
                held.put(replacement)
        except BaseException:  # one could not be replaced
            self.put_back()
            raise

    def put_back(self) -> None:
        del self.standing[id(self)]
        held, self._held = self._held, []
        if self._noted:
            HOLDERS.give_back(self._given)
        HOLDERS.standing.pop(id(self), None)
        for module, name, original, _ in held:
            vars(module)[name] = original
        for one, _ in self._in_programs:
            one.put(one.original)
        as_replaced = _are_there((place.own, place.replacements) for place in self._places)
        for place in self._places:
            place.put_back(as_replaced)
        for owner, name, found in self._of_program:
            now = vars(owner).get(name)
            if now is not found and is_left_over(now) and not self._stands(now):
                _give_back(owner, name)

    @classmethod
    def _stands(cls, found: Any) -> bool:
        """Return whether one in place has put something there."""
        return any(
            one is found
            for patch in cls.standing.values()
            for place in patch._places
            for one in place.replacements.values()
        )

    def stood_before(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield owners, names and what stood there before this, while it is in place."""
        for place in self._places:
            yield from ((place.owner, name, one) for name, one in place.before.items())
        yield from ((module, name, original) for module, name, original, _ in self._held)

    def _held_elsewhere(self) -> list[tuple[Any, str, Any, Any]]:
        """Return the places of functions and classes that other modules hold by their own names.

        A module that is imported meanwhile holds the replacement, and is given the original
        afterwards.
        """
        by_original = self._of_modules
        if not by_original:
            return []
        if self._firsts is None:  # the same as long as this fits
            self._firsts = HOLDERS.firsts(original for original, _ in by_original.values())
        return [
            (module, name, original, by_original[id(original)][1])
            for module, name, original in HOLDERS.of(self._firsts)
        ]


def _give_back(owner: Any, name: str) -> Any:
    """Put back, and return, what was there first: a program kept what a patch had put there, and
    put that back when the patch was gone (``monkeypatch`` at the end of a test).
    """
    _, original = Patch.originals.get((id(owner), name), (owner, ABSENT))
    _bind(owner, name, original)
    return original


@contextmanager
def nothing_replaced(within: Any = None) -> Iterator[None]:
    """Put back all that is replaced, or what is replaced in one class or module, for a while.

    What is imported meanwhile, and keeps functions of torch in tables, has torch's own.
    """
    before = {
        key: [one for one in patch.stood_before() if within is None or one[0] is within]
        for key, patch in Patch.standing.items()
    }
    now = {
        key: [(owner, name, vars(owner).get(name, ABSENT)) for owner, name, _ in found]
        for key, found in before.items()
    }
    for found in reversed(before.values()):
        for place in reversed(found):
            _bind(*place)
    try:
        yield
    finally:
        for key, found in now.items():
            if key in Patch.standing:  # and was not taken away meanwhile
                for place in found:
                    _bind(*place)


def _bind(owner: Any, name: str, value: Any) -> None:
    """Have a class or module name something, or nothing (``ABSENT``)."""
    if vars(owner).get(name, ABSENT) is value:
        return
    if value is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def standing_functions() -> dict[int, Any]:
    """Return what stands now in the place of functions of modules, by the originals' ids."""
    return {
        id(original): vars(owner)[name]
        for patch in reversed([*Patch.standing.values()])
        for owner, name, original in patch.stood_before()
        if isinstance(owner, ModuleType) and callable(original) and name in vars(owner)
    }


@cache
def _unknown(owner: Any, names: tuple[str, ...], callables: tuple[bool, ...]) -> list[str]:
    """Return the attributes that are not there, or are functions where none is expected. Those that
    only instances of a class have can be replaced by a property.
    """
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for name, function in zip(names, callables, strict=True)
        if (
            function or not methods_name(owner, name)
            if (found := getattr(owner, name, ABSENT)) is ABSENT
            else callable(found) is not function
        )
    ]


def _unbound(method: MethodType) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function


def is_another(known: Callable[..., Any] | None, function: Callable[..., Any]) -> bool:
    """Return whether a registry's entry would be replaced by a function from another place. A
    module that is imported anew, as under pytester in one process, registers its own again.
    """
    place = attrgetter("__module__", "__qualname__")
    return known is not None and place(known) != place(function)


#: What optimizers and ``clip_grad_norm_`` sort tensors by.
group_tensors = Replaceable("torch._C._group_tensors_by_device_and_dtype")
#: What reads the arguments of ``Module.to``.
parse_to = Replaceable("torch._C._nn._parse_to")
#: Whether recurrent modules lay their weights in one piece.
flatten_weights = Replaceable("torch._use_cudnn_rnn_flatten_weight")
#: What ``vmap`` and ``grad`` wrap the tensors with that they are given.
wrap_for_transform = (
    Replaceable("torch._functorch.vmap._add_batch_dim"),
    Replaceable("torch._functorch.eager_transforms._wrap_for_grad"),
)
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
_STAGE = "torch.distributed.pipelining.stage.PipelineStage"
pipeline_stage = private_if_imported(_STAGE)
needs_messages = private_if_imported("torch.distributed.pipelining.stage.InferenceMode")
GIVEN_TENSORS = private_name_if_imported(f"{_STAGE}._user_meta")
FORWARD_VOTE = private_name_if_imported(f"{_STAGE}._warmup_forward_vote")
BACKWARD_RESULT = private_name_if_imported(f"{_STAGE}._warmup_backward_result")
#: What ``fully_shard`` and its like made, by module.
module_states = private_if_imported("torch.distributed._composable_state._module_state_mapping")
#: What ``fully_shard`` and ``replicate`` begin with, before they move parameters to the device.
_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"
fully_sharding = private_if_imported(_FULLY_SHARD)
SHARDED_STATES = private_name_if_imported(f"{_FULLY_SHARD}._get_modules_and_states")
_REPLICATE = "torch.distributed._composable.replicate_with_fsdp"
replicating = private_if_imported(_REPLICATE)
REPLICATED_STATES = private_name_if_imported(f"{_REPLICATE}._get_modules_and_states")
#: Where composable functions are; few programs import it.
CONTRACT = "torch.distributed._composable.contract"
#: Where a module holds the states of the functions that were applied to it, and their names.
state_table = private_if_imported("torch.distributed._composable.contract.STATE_KEY")
name_table = private_if_imported("torch.distributed._composable.contract.REGISTRY_KEY")
#: What stands by such a name: it is made when the function is applied.
applied_item = private_if_imported("torch.distributed._composable.contract.RegistryItem")
#: What processes agree by on who writes what of a checkpoint, and whether they write all of it.
checkpoint_agreement = private_if_imported("torch.distributed.checkpoint.utils._DistWrapper")
_PLANNER = "torch.distributed.checkpoint.default_planner"
checkpoint_planner = private_if_imported(_PLANNER)
VALIDATE_PLAN = private_name_if_imported(f"{_PLANNER}._validate_global_plan")
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
to_dlpack = (Replaceable("torch._C._to_dlpack"), Replaceable("torch._C._to_dlpack_versioned"))
#: What a fake tensor answers to C++ about itself, by operator.
metadata_handlers = Replaceable("torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS")
#: What runs a kernel on zeros for a fake tensor, of an operator without one for ``meta``.
fallback_kernel = Replaceable("torch._subclasses.fake_tensor.run_fallback_kernel")
