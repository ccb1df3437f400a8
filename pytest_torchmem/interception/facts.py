"""Takes note of what a step is run with: modes of modules, frozen parameters, optimizers, inputs.

Called for every call of a module, so it does next to nothing where nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_torchmem.profile.facts import (
    IN_PLACE,
    INPUTS,
    MODES,
    MODULES,
    OPTIMIZERS,
    PARAMETERS,
    TOPICS,
    Facts,
)
from pytest_torchmem.profile.module_paths import Numbers, fold, write_numbers
from pytest_torchmem.profile.timeline import Origin, Phase

_MOST_GEOMETRIES = 4
_SETTINGS = {
    ("_attn_implementation_internal", "_attn_implementation"): "attention {}",
    ("output_hidden_states",): "output_hidden_states",
    ("_output_attentions", "output_attentions"): "output_attentions",
}
"""Attributes of a transformers configuration that change what a step keeps, by the names that its
versions have for them, and how they read."""
_OPTIONS = ("amsgrad", "momentum", "centered", "differentiable")
"""Options of optimizers that cost memory."""


class Mode(NamedTuple):
    """How a module is called."""

    gradients: bool = True
    autocast: str = ""
    """The dtype of autocast, "" where it is off."""
    training: bool = True
    recomputed: bool = False

    def beside(self, outer: Mode) -> str:
        """Return in words what differs from the mode of the module around it."""
        parts = []
        if self.recomputed and not outer.recomputed:
            parts.append("recomputed")
        if self.gradients != outer.gradients and not self.recomputed:
            parts.append("with gradients" if self.gradients else "no_grad")
        if self.autocast != outer.autocast:
            parts.append(f"autocast {self.autocast or 'off'}")
        if self.training != outer.training:
            parts.append("training" if self.training else "eval")
        return ", ".join(parts)


_USUAL = Mode()


class FactCollector:
    """The facts of the step that is traced."""

    def __init__(self) -> None:
        self.device = "cpu"
        """The device that autocast is asked for."""
        self.calls: dict[Origin, int] = {}
        """How often each operator was called at each place."""
        self.broadcasts: dict[Origin, str] = {}
        """Where an operator's output has more elements than any input, and the inputs' shapes."""
        self._modes: dict[tuple[str, str], set[Numbers]] = {}
        self._known: dict[str, dict[str, str]] = {topic: {} for topic in TOPICS}
        self._dtypes: dict[torch.dtype, str] = {}

    def called(self, path: str, module: nn.Module, task: int, outer: Mode | None) -> Mode:
        """Take note of the mode that a module is called in, and return it."""
        autocast = ""
        if torch.is_autocast_enabled(self.device):
            dtype = torch.get_autocast_dtype(self.device)
            autocast = self._dtypes.setdefault(dtype, str(dtype).removeprefix("torch."))
        mode = Mode(torch.is_grad_enabled(), autocast, module.training, task != -1)
        if outer is None:
            self._settings_of(path, module)
            outer = _USUAL
        if mode != outer:
            text = mode.beside(outer)
            if text:
                pattern, numbers = fold(path)
                self._modes.setdefault((pattern, text), set()).add(numbers)
        return mode

    def given(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Take note of an input's geometry; of several by one name the place is told too."""
        known = self._known[INPUTS]
        for position, tensor in enumerate(tensors):
            own = f"{name}[{position}]" if position else name
            geometry = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            before = known.get(own, "").split("; ") if own in known else []
            if geometry not in before and len(before) < _MOST_GEOMETRIES:
                known[own] = "; ".join([*before, geometry])

    def model(self, root: nn.Module) -> None:
        """Take note of the parameters of an outermost module that are frozen, or one."""
        known, name = self._known[PARAMETERS], type(root).__name__
        first: dict[int, str] = {}
        frozen: dict[str, set[Numbers]] = {}
        for path, parameter in root.named_parameters(remove_duplicate=False):
            own = first.setdefault(id(parameter), path)
            if own != path:
                known[f"{name}.{path}"] = f"is {name}.{own}"
        self._find_frozen(root, name, frozen)
        for pattern, numbers in frozen.items():
            known[pattern] = ", ".join(filter(None, ("frozen", write_numbers(numbers))))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer that makes a step."""
        options = [name for name in _OPTIONS if optimizer.defaults.get(name)]
        self._known[OPTIMIZERS].setdefault(type(optimizer).__name__, ", ".join(options))

    def facts(self) -> Facts:
        """Return what was noted, by topic and name, both in order."""
        found = {topic: dict(known) for topic, known in self._known.items()}
        for (pattern, text), numbers in sorted(self._modes.items()):
            where = write_numbers(numbers)
            told = f"{text}, {where}" if where else text
            modes = found[MODES]
            modes[pattern] = f"{modes[pattern]}; {told}" if pattern in modes else told
        found[OPTIMIZERS] = {
            name: ", ".join(filter(None, (self._implementation(), options)))
            for name, options in found[OPTIMIZERS].items()
        }
        found[IN_PLACE] = {name: f"{n} calls" for name, n in sorted(self._in_place().items())}
        return {topic: known for topic, known in found.items() if known}

    def _settings_of(self, path: str, module: nn.Module) -> None:
        config: Any = getattr(module, "config", None)
        if config is None or path in self._known[MODULES]:
            return
        parts = []
        try:  # as it is written down there: what the program runs to be asked is not run
            own = object.__getattribute__(config, "__dict__")
        except AttributeError:
            return
        for names, text in _SETTINGS.items():
            value = next((own[name] for name in names if name in own), None)
            if value and isinstance(value, str | bool):
                parts.append(text.format(value))
        if parts:
            self._known[MODULES][path] = ", ".join(parts)

    def _find_frozen(self, module: nn.Module, path: str, frozen: dict[str, set[Numbers]]) -> None:
        """Note the outermost modules all of whose parameters are frozen, and single parameters."""
        trains = {parameter.requires_grad for parameter in module.parameters()}
        if True not in trains:
            if trains:
                pattern, numbers = fold(path)
                frozen.setdefault(pattern, set()).add(numbers)
            return
        if False not in trains:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                pattern, numbers = fold(f"{path}.{name}")
                frozen.setdefault(pattern, set()).add(numbers)
        for name, child in module.named_children():
            self._find_frozen(child, f"{path}.{name}", frozen)

    def _implementation(self) -> str:
        """Return how optimizers go over their parameters, by the operators that they called."""
        names = {origin.operator for origin in self.calls if origin.phase is Phase.OPTIMIZER}
        if any(name.startswith("aten::_fused_") for name in names):
            return "fused"
        return "foreach" if any(name.startswith("aten::_foreach_") for name in names) else "loop"

    def _in_place(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for origin, number in self.calls.items():
            name = origin.operator.partition(".")[0]
            in_step = origin.module and origin.phase is Phase.FORWARD
            if in_step and name.endswith("_") and not name.endswith("__"):
                found[name] = found.get(name, 0) + number
        return found
