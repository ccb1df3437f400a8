"""Takes note of what a step is run with: modes of modules, frozen parameters, optimizers, inputs.

Called for every call of a module, so it does next to nothing where nothing has changed.
"""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import compress
from math import isfinite
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from pytest_torchmem.interception.ledger import dtype_name
from pytest_torchmem.profile.facts import (
    AUTOCAST,
    CHECKPOINT,
    EMPTY_CACHE,
    IN_MODE,
    IN_PART,
    NO_BACKWARD,
    PACKED,
    TOPICS,
    UNCACHED,
    Calls,
    Counts,
    Facts,
    Geometry,
    InMode,
    Layer,
    Scalar,
    Sized,
    Topic,
    scalar,
    settings_of,
)
from pytest_torchmem.profile.module_paths import Numbers, fold, prefixes, write_numbers
from pytest_torchmem.profile.timeline import Origin, Phase
from pytest_torchmem.step.imports import is_installed
from pytest_torchmem.step.trees import tensors_by_path, tensors_in
from pytest_torchmem.torch_private import modes, patches
from pytest_torchmem.torch_private.distributed import arguments_of_sharding
from pytest_torchmem.torch_private.settings import figure_settings, saved_tensors_hooks
from pytest_torchmem.torch_private.tensors import CHILDREN, current_node, node_number, unwrapped
from pytest_torchmem.torch_private.tensors import PARAMETERS as OWN_PARAMETERS

_MOST_GEOMETRIES = 4
_MOST_LINES = 4
_MOST_LOOKED_FOR = 64
"""Calls of a module of which lines are looked for."""
_CHECKPOINT = "_checkpoint_hook", "_recomputation_hook"
"""Hooks of saved tensors that torch.utils.checkpoint enters."""
_MOST_LAYERS = 200
"""Of a model with more kinds of layers none are noted: a snapshot is for people to read."""
_MOST_SETTINGS = 40
_LONGEST_VALUE = 40
_ENDS_VALUE = re.compile(r"[,;|@\n]")
"""What a value has not that is to be read among others."""
_TENSORS = frozenset({Tensor, nn.Parameter})
"""Classes whose sizes are numbers: those of a subclass may have names that change."""
_PLAIN = frozenset({bool, int, float, str})
"""Of exactly these, and not of what a program or a trace derives from them."""
_CONTAINERS = (bool, int, float, str, list, tuple, dict, set)
"""Arguments that are not told by their class."""
_OF_TORCH = ("torch.nn.modules.", "torch.ao.nn.")
_OF_ONE_MODULE = re.compile(r"^training$|(^|_)(idx|index|id|number|i)$")
"""Attributes that tell one of equal modules from the others."""
_NOT_OF_MEMORY = ("model_type", "transformers_version", "dtype", "torch_dtype")
_SETTINGS = {
    ("_attn_implementation_internal", "_attn_implementation"): "attention {}",
    ("output_hidden_states",): "output_hidden_states",
    ("_output_attentions", "output_attentions"): "output_attentions",
}
"""Attributes of a transformers configuration that change what a step keeps, by the names that its
versions have for them, and how they read."""
_CHANNELS_LAST = "channels last"
_OF_IMAGES = 4
"""The dimensions of what can be that."""
_PASS_ON = tuple(f"aten::{one}" for one in ("add.Tensor", "cat", "clone", "stack", "sum"))
"""Operators whose backward calls none that makes a tensor (tools/autograd/derivatives.yaml), as
that of an embedding with a sparse gradient (Embedding.cpp, ``embedding_sparse_backward``)."""
_OPTIONS = ("amsgrad", "momentum", "centered", "differentiable", "maximize", "weight_decay")
"""Options of optimizers that cost memory."""

CallArguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
"""The arguments of a call, by place and by name."""


class _Patterns(dict[tuple[str, Any], set[Numbers]]):
    """What modules are or do, by their pattern, and the numbers of those."""

    def note(self, path: str, own: Any) -> None:
        pattern, numbers = fold(path)
        self.setdefault((pattern, own), set()).add(numbers)


def _by_pattern(
    known: Iterable[tuple[tuple[str, Any], set[Numbers]]], kind: Callable[..., Any]
) -> dict[str, tuple[Any, ...]]:
    """Return what modules are or do, with the numbers that each is true of, by their pattern."""
    found: dict[str, tuple[Any, ...]] = {}
    for (pattern, own), numbers in known:
        one = kind(*own)._replace(numbers=write_numbers(numbers))
        found[pattern] = (*found.get(pattern, ()), one)
    return found


class Mode(NamedTuple):
    """How a module is called."""

    gradients: bool = True
    autocast: str = ""
    """The dtype of autocast, "" where it is off."""
    training: bool = True
    recomputed: bool = False
    packed: str = ""
    """What packs saved tensors, as ``torch.autograd.graph.save_on_cpu`` does."""

    def beside(self, outer: "Mode") -> Iterator[InMode]:
        """Yield what differs from the mode of the module around it."""
        if self.recomputed and not outer.recomputed:
            yield InMode("recomputed")
        if self.gradients != outer.gradients and not self.recomputed:
            yield InMode("with gradients" if self.gradients else "no_grad")
        if self.autocast != outer.autocast:
            yield InMode(AUTOCAST, self.autocast or "off")
        if self.training != outer.training:
            yield InMode("training" if self.training else "eval")
        if self.packed and self.packed != outer.packed:
            yield InMode(PACKED, self.packed)


_USUAL = Mode()
_tuple: Any = tuple.__new__
"""Makes one as its class does, without a call of Python for each call of a module."""


class Called:
    """How often an operator was called at a place."""

    __slots__ = ("origin", "times")

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.times = 0


class FactCollector:
    """The facts of the step that is traced."""

    def __init__(self, line: Callable[[], str] = str) -> None:
        self._line = line
        """Returns the program's line that runs, "" for none."""
        self.callers: dict[str, str] = {}
        """Outermost modules of installed libraries, and the program's lines that call them."""
        self.library_lines: dict[tuple[str, str], str] = {}
        """By modules, as patterns, and libraries' lines: the program's that call them, or ""."""
        self.device = "cpu"
        """The device that autocast is asked for."""
        self.describes = 0
        """The thread that asks a module about itself, 0 for none: what it prints then is not the
        program's."""
        self.calls: list[Called] = []
        """Each operator at each place."""
        self.sites: dict[Origin, tuple[CodeType, int]] = {}
        """The code that called a function of torch which called an operator, and where in it."""
        self.broadcasts: dict[Origin, str] = {}
        """Where an operator's output has more elements than any input, and the inputs' shapes."""
        self._modes, self._layers, self._given = _Patterns(), _Patterns(), _Patterns()
        self._sizes = _Patterns()
        """Of parameters."""
        self._counts: dict[str, dict[str, tuple[int, dict[str, None]]]] = {
            topic: {} for topic in (Topic.CALLS, Topic.COMPILED, Topic.BACKWARD)
        }
        """How often something happened, and the lines that did it, by topic and name."""
        self._times: dict[str, int] = {}
        """How often each module was called, but by checkpoints again."""
        self._checkpoints: dict[str, Counter[int]] = {}
        """By the pattern of modules that checkpoints call: by the node of the backward that runs
        each, how many."""
        self._seen: set[tuple[str, int]] = set()
        """Modules whose layer is noted."""
        self._arguments: dict[str, dict[str, None]] = {}
        self._optimizers: dict[str, list[ref[torch.optim.Optimizer]]] = {}
        """Those that made steps, by their classes: what is freed may be followed at its address."""
        self._in_loops: set[str] = set()
        """The names of those that have no other way to go over their parameters."""
        self._configurations: dict[str, tuple[Any, dict[str, Any]]] = {}
        """Configurations of modules by their paths, and what they held when first called."""
        self._known: dict[str, dict[str, Any]] = {topic: {} for topic in TOPICS}

    def called(
        self, path: str, module: nn.Module, given: CallArguments, task: int, outer: Mode | None
    ) -> Mode:
        """Take note of a module's call and of the mode that it runs in; return that."""
        autocast = ""
        if torch.is_autocast_enabled(self.device):
            autocast = dtype_name(torch.get_autocast_dtype(self.device))
            if not torch.is_autocast_cache_enabled():
                autocast += UNCACHED
        # ``torch.jit.freeze`` leaves a module without it.
        training = getattr(module, "training", False)
        packed = ""
        if (hooks := saved_tensors_hooks(False)) is not None:
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__).partition(".")[0]
            packed = "" if name in _CHECKPOINT else name
        mode: Mode = _tuple(Mode, (torch.is_grad_enabled(), autocast, training, task != -1, packed))
        if task == -1:
            self._times[path] = self._times.get(path, 0) + 1
        if outer is None:
            if task == -1:  # a checkpoint calls by itself what a model called before
                self._settings_of(path, module)
                self.settings()  # what was set meanwhile, too
                self._count(Topic.CALLS, path, self._line)
                for one in mode.beside(_USUAL):
                    if one.name in ("no_grad", "eval", AUTOCAST):
                        self._count(Topic.CALLS, IN_MODE.format(one.text, path), self._line)
            else:
                spans = self._checkpoints.setdefault(fold(path)[0], Counter())
                spans[node_number(current_node())] += 1
            # What a checkpoint calls again is in the modes that it was called in before.
            outer = _USUAL if task == -1 else mode._replace(recomputed=False)
        own = (path, id(module))
        if own not in self._seen:
            self._seen.add(own)
            self._note_layer(path, module, given[0])
            if (
                _is_of_library(str(type(module).__module__))
                and path.partition(".")[0] not in self.callers  # as of most
                and self.callers.keys().isdisjoint(prefixes(path))
            ):
                self.callers[path] = self._line()
                if "." in path:  # of outermost modules whoever calls them takes note
                    self.called_with(fold(path)[0], *given)
        if mode != outer:
            for one in mode.beside(outer):
                self._modes.note(path, one)
        return mode

    def _count(
        self, topic: str, name: str, line: Callable[[], str], most: int = _MOST_LINES
    ) -> None:
        """Count what happens, and take note of its first lines."""
        number, lines = self._counts[topic].get(name, (0, {}))
        if number < _MOST_LOOKED_FOR and len(lines) < most and (found := line()):
            lines[found] = None
        self._counts[topic][name] = number + 1, lines

    def emptied(self) -> None:
        """Take note that the program gives free blocks back to the GPU."""
        self._count(Topic.CALLS, EMPTY_CACHE, self._line)

    def recomputed(self, path: str) -> None:
        """Take note that a checkpoint computes again what a module has not left to others."""
        self._modes.note(path, InMode("recomputed in part"))

    def given(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Take note of an input's geometry; of several by one name the place is told too."""
        known = self._known[Topic.INPUTS]
        for position, tensor in enumerate(tensors):
            own = f"{name}[{position}]" if position else name
            (nested, sizes), dtype = _shape_of(tensor), dtype_name(tensor.dtype)
            geometry = Geometry(f"{nested} {dtype}".lstrip(), sizes)
            before = known.get(own, ())
            if _is_channels_last(tensor):
                self._known[Topic.FORMATS][own] = _CHANNELS_LAST
            if geometry not in before and len(before) < _MOST_GEOMETRIES:
                known[own] = (*before, geometry)

    def called_with(self, name: str, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Take note of what a module is called with, beside tensors in their places."""
        found = self._arguments.setdefault(name, {})
        for position, value in enumerate(args):
            if type(value) in (bool, str) and _is_short(value):
                found[f"argument {position} {value}"] = None
        for key, value in kwargs.items():
            if type(value) in (bool, int, str) and _is_short(value):
                found[f"{key}={value}"] = None
            elif any(True for _ in tensors_in(value)):
                found[key] = None
            elif value is not None and not isinstance(value, _CONTAINERS):
                found[f"{key}={type(value).__name__}"] = None

    def backward(self, keeps: bool, creates: bool, vmapped: bool, line: str) -> None:
        """Take note of a backward that begins, and of what ``line`` asked the engine for."""
        self._count(Topic.BACKWARD, "calls", str)
        retains = keeps and not creates
        asked = {"retain_graph": retains, "create_graph": creates, "vmap": vmapped}
        for name in (name for name, is_so in asked.items() if is_so):
            self._count(Topic.BACKWARD, name, lambda: line, 1)

    def compiled(self, asked: Mapping[str, str], broken_at: str) -> None:
        """Take note that the program has had a graph compiled, of what was asked for, and of the
        line at which the graph breaks off, "" where it is whole.
        """
        self._count(Topic.COMPILED, "graphs", self._line, 1)
        if broken_at:
            self._count(Topic.COMPILED, "breaks", lambda: broken_at)
        self._known[Topic.SETTINGS].update(asked)

    def settings(self) -> None:
        """Take note of the settings that figures depend on now."""
        self._known[Topic.SETTINGS].update(figure_settings(self.device))

    def model(self, root: nn.Module) -> None:
        """Take note of an outermost module's parameters: their sizes, what is frozen, what one."""
        tied, name = self._known[Topic.TIED], type(root).__name__
        first: dict[int, str] = {}
        frozen = _Patterns()
        trains = True
        for module, own, parameter in tensors_by_path(root, OWN_PARAMETERS, each_once=False):
            path = f"{name}.{module}.{own}" if module else f"{name}.{own}"
            trains = trains and parameter.requires_grad
            met_at = first.setdefault(id(parameter), path)
            if met_at != path:
                tied[path] = met_at
            elif not is_lazy(parameter):
                self._sizes.note(path, ("", tuple(parameter.shape)))
            if _is_channels_last(parameter):
                self._known[Topic.FORMATS][name] = _CHANNELS_LAST
        if not trains:
            self._find_frozen(root, name, frozen)
        for (pattern, _), numbers in frozen.items():
            self._known[Topic.FROZEN][pattern] = write_numbers(numbers)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        options = [name for name in _OPTIONS if optimizer.defaults.get(name)]
        if optimizer.defaults.get("decoupled_weight_decay"):  # which is in place
            options = [name for name in options if name != "weight_decay"]
        # The counts among its options, such as ``history_size=100``: rates and weights that were
        # written without a point are 0 or 1.
        numbers = optimizer.defaults.items()
        options += [
            f"{name}={value}" for name, value in numbers if type(value) is int and value > 1
        ]
        name = type(optimizer).__name__
        own = self._optimizers.setdefault(name, [])
        if len(own) < _MOST_LINES and not any(one() is optimizer for one in own):
            own.append(ref(optimizer))
            name = f"{name} {len(own)}" if own[1:] else name
            self._known[Topic.OPTIMIZERS][name] = tuple(options)
            is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
            if is_of_torch and "foreach" not in optimizer.defaults:  # as ``SparseAdam``
                self._in_loops.add(name)
            names = {name for state in optimizer.state.values() for name in _tensors_of(state)}
            self._known[Topic.STATES][name] = tuple(sorted(names))

    def facts(self, calls: Iterable[tuple[Origin, int]] = ()) -> Facts:
        """Return what was noted by topic and name; ``calls`` are of operators, with their nodes."""
        for path, (config, own) in self._configurations.items():
            self._note_configuration(path, config, own)
        found = {topic: dict(known) for topic, known in self._known.items()}
        repeated, in_part = self._called_inside()
        modes = sorted((self._modes | self._unreached() | in_part).items())
        found[Topic.MODES] = _by_pattern(modes, InMode)
        layers = sorted(self._layers.items(), key=lambda item: (item[0][0], str(item[0][1])))
        found[Topic.LAYERS] = _by_pattern(layers, lambda kind, own: Layer(kind, dict(own)))
        given = found[Topic.GIVEN] = _by_pattern(self._given.items(), Sized)
        # What a layer makes says as much.
        sizes = (one for one in self._sizes.items() if one[0][0].rpartition(".")[0] not in given)
        found[Topic.SIZES] = _by_pattern(sizes, Sized)
        for topic in (Topic.LAYERS, Topic.GIVEN, Topic.SIZES):
            if len(found[topic]) > _MOST_LAYERS:
                found[topic] = {}
        for topic, counted in self._counts.items():
            found[topic] = {name: Calls(n, tuple(lines)) for name, (n, lines) in counted.items()}
        found[Topic.CALLS] |= repeated
        for name, calls_of in [*found[Topic.CALLS].items()]:
            path = name.rpartition(", of ")[2]
            if path != name and calls_of == found[Topic.CALLS][path]:
                del found[Topic.CALLS][name]  # of all its calls, its modes tell
        found[Topic.ARGUMENTS] = {name: tuple(own) for name, own in self._arguments.items() if own}
        found[Topic.OPERATORS] = _operators([*calls])
        # How optimizers go over their parameters, by the operators that they called.
        ran = {one.origin.operator for one in self.calls if one.origin.phase is Phase.OPTIMIZER}
        ways = {
            way for way in ("fused", "foreach") for one in ran if one.startswith(f"aten::_{way}_")
        }
        way = "fused" if "fused" in ways else "foreach" if ways else "loop"
        for name, options in found[Topic.OPTIMIZERS].items():
            found[Topic.OPTIMIZERS][name] = ("loop" if name in self._in_loops else way, *options)
        in_place: dict[str, int] = {}
        for called in self.calls:
            origin = called.origin
            own_name = origin.operator.partition(".")[0]
            in_step = origin.module and origin.phase is Phase.FORWARD
            if in_step and own_name.endswith("_") and not own_name.endswith("__"):
                in_place[own_name] = in_place.get(own_name, 0) + called.times
        found[Topic.IN_PLACE] = dict(sorted(in_place.items()))
        return {topic: known for topic, known in found.items() if known}

    def _note_layer(self, path: str, module: nn.Module, args: Sequence[Any]) -> None:
        kind: Any = type(module)
        own = vars(module)
        if CHILDREN not in own:  # a ``ScriptModule``, which has them in C++ (torch/jit/_script.py)
            return
        given: Any = args[0] if args else None
        packed = type(given) is PackedSequence
        tensor = given.data if packed else given
        if not own[CHILDREN] and own[OWN_PARAMETERS] and type(tensor) in _TENSORS:
            word, sizes = _shape_of(tensor)
            self._given.note(path, ("packed" if packed else word, sizes))
        settings: tuple[tuple[str, Scalar], ...] = ()
        if str(kind.__module__).startswith(_OF_TORCH):
            if own[CHILDREN]:
                return
            name = f"nn.{kind.__name__}"
            with suppress(AttributeError):  # of which the program has taken one away
                switches = [one for one in _switches(kind) if own.get(one) is True]
                with patches.having(self, describes=get_ident()):
                    # ``nn.EmbeddingBag`` prints its weights to say a few numbers
                    settings = _settings_with(module.extra_repr(), (*switches,))
        else:  # a program's ``extra_repr`` may compute something, which would be traced
            own_settings = _scalars(own, own, _is_of_all)
            own_settings.update((key, scalar(one)) for key, one in arguments_of_sharding(module))
            name, settings = kind.__name__, (*own_settings.items(),)
        self._layers.note(path, (name, settings))

    def _settings_of(self, path: str, module: nn.Module) -> None:
        config: Any = vars(module).get("config")
        if config is None or path in self._configurations:
            return
        try:  # as it is written down there: what the program runs to be asked is not run
            own = object.__getattribute__(config, "__dict__")
        except AttributeError:
            return
        self._configurations[path] = config, dict(own)

    def _note_configuration(self, path: str, config: Any, own: dict[str, Any]) -> None:
        """Note what a configuration says; to ask for that runs lines of its library."""
        wanted = list(own)
        if str(type(config).__module__).startswith("transformers."):
            # what is not as its class has it
            with suppress(Exception):
                wanted = [name for name in config.to_diff_dict() if name not in _NOT_OF_MEMORY]
        self._known[Topic.CONFIGURATION][path] = dict(sorted(_scalars(own, wanted).items()))
        parts = []
        for names, text in _SETTINGS.items():
            value = next((own[name] for name in names if name in own), None)
            if value and isinstance(value, str | bool):
                parts.append(text.format(value))
        if parts:
            self._known[Topic.MODULES][path] = tuple(parts)

    def _find_frozen(self, module: nn.Module, path: str, frozen: _Patterns) -> None:
        """Note the outermost modules all of whose parameters are frozen, and single parameters."""
        parameters = list(tensors_by_path(module, OWN_PARAMETERS))
        trains = {parameter.requires_grad for _, _, parameter in parameters}
        if True not in trains:
            if trains:
                frozen.note(path, None)
            return
        if False not in trains:
            return
        for inner, name, parameter in parameters:
            if not (inner or parameter.requires_grad):
                frozen.note(f"{path}.{name}", None)
        for name, child in module.named_children():
            self._find_frozen(child, f"{path}.{name}", frozen)

    def _called_inside(self) -> tuple[dict[str, Calls], _Patterns]:
        """Return the modules that each call of the module around them calls more than once, with
        how many checkpoints there are that span several; and those that only some calls call.
        """
        repeated: dict[str, Calls] = {}
        in_part = _Patterns()
        for path, number in self._times.items():
            pattern = fold(path)[0]
            around = next((one for one in prefixes(path)[-2::-1] if one in self._times), path)
            outer = self._times[around]
            if number < outer:
                in_part.note(path, InMode(IN_PART, f"{number} of {outer}"))
            elif number // outer > max(1, repeated.get(pattern, Calls()).number):
                repeated[pattern] = Calls(number // outer)
        for pattern, spans in self._checkpoints.items():
            modules = len(self._modes[pattern, InMode("recomputed")])
            if (number := modules * len(spans) // spans.total()) < modules:  # each in several steps
                repeated[f"{CHECKPOINT}{pattern}"] = Calls(number)
        return repeated, in_part

    def _unreached(self) -> _Patterns:
        """Return the outermost modules that no backward comes to, by pattern and mode."""
        ran: dict[Phase, set[str]] = {Phase.FORWARD: set(), Phase.BACKWARD: set()}
        sparse = {path for (path, own) in self._layers if ("sparse", True) in own[1]}
        for origin in (called.origin for called in self.calls):
            passes_on = origin.operator in _PASS_ON or fold(origin.module)[0] in sparse
            if origin.module and origin.phase in ran and not passes_on:
                ran[origin.phase].update(prefixes(origin.module))
        found = _Patterns()
        left = ran[Phase.FORWARD] - ran[Phase.BACKWARD] if ran[Phase.BACKWARD] else set()
        without = {pattern for pattern, mode in self._modes if mode.name == "no_grad"}
        for path in left:
            outer = prefixes(path)
            if any(fold(one)[0] in without for one in outer) or left.intersection(outer[:-1]):
                continue  # it is said already
            found.note(path, InMode(NO_BACKWARD))
        return found


def _operators(calls: Sequence[tuple[Origin, int]]) -> dict[str, Counts]:
    """Return how often the forward called each operator that makes tensors."""
    reached = {-node for _, node in calls if node < 0}
    forward = [call for call in calls if call[0].phase is Phase.FORWARD]
    called = Counter(origin.operator for origin, _ in forward)
    left_out = Counter(origin.operator for origin, node in forward if not node)
    met = Counter(origin.operator for origin, node in forward if node > 0 and node in reached)
    return {
        name: Counts(called[name], left_out[name], met[name])
        for name in sorted(called)
        if not name.partition(".")[0].endswith("_")
    }


def _is_of_library(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not name.startswith("torch.") and is_installed(file)


def _shape_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Return "nested" or "", and the sizes; no mode of the program and no tracer sees that."""
    if modes.function_modes() or modes.jit_tracing() is not None:
        with modes.not_jit_tracing(), modes.NoFunctionModes():
            return _shape_of(tensor)
    if tensor.is_nested:  # C++ has no sizes of one (NestedTensorImpl.cpp, sizes_custom)
        return "nested", (tensor.size(0),)
    return "", tuple(size if type(size) is int else 0 for size in tensor.shape)  # 0: a symbol


def _is_channels_last(tensor: Tensor) -> bool:
    """Tell whether channels come last in memory, and would not in a contiguous tensor. A tensor
    inside of ``vmap`` does not say: functorch/BatchedTensorImpl.cpp, ``is_contiguous_custom``.
    """
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.dim() != _OF_IMAGES:
        return False
    if unwrapped(tensor) is not None:
        return False
    channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
    return channels_last and not tensor.is_contiguous()


def _tensors_of(state: object) -> Iterator[str]:
    """Yield the names of what an optimizer keeps of a parameter and that is as large."""
    if isinstance(state, dict):
        for name, value in state.items():
            if any(tensor.dim() for tensor in tensors_in(value)):
                yield str(name)


@lru_cache(maxsize=1024)
def _switches(kind: type) -> tuple[str, ...]:
    """Return the arguments of a class of torch's that are off by default. ``extra_repr`` leaves out
    some, such as ``sparse`` of ``nn.EmbeddingBag``.
    """
    arguments = inspect.signature(kind).parameters.values()
    return tuple(one.name for one in arguments if one.default is False)


@lru_cache(maxsize=1024)
def _settings_with(said: str, switches: tuple[str, ...]) -> tuple[tuple[str, Scalar], ...]:
    """Return the settings that a module of torch tells, and the switches that are on."""
    settings = settings_of(said)
    return (*settings.items(), *((one, True) for one in switches if one not in settings))


@lru_cache(maxsize=4096)
def _is_of_all(name: str) -> bool:
    """Return whether an attribute is the same for equal modules."""
    return not _OF_ONE_MODULE.search(name)


def _scalars(
    values: Mapping[str, Any], names: Collection[str], counts: Callable[[str], bool] = bool
) -> dict[str, Scalar]:
    """Return the public numbers, texts and switches of the names that count."""
    plain = map(_PLAIN.__contains__, map(type, map(values.get, names)))
    found = [
        (name, value if type(value) is not float or isfinite(value) else str(value))
        for name in compress(names, plain)  # most of a module's are tables
        if not name.startswith("_") and counts(name) and _is_short(value := values[name])
    ]
    return dict(found[:_MOST_SETTINGS])


def _is_short(value: object) -> bool:
    text = str(value)
    return 0 < len(text) <= _LONGEST_VALUE and not _ENDS_VALUE.search(text)
