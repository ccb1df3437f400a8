"""Random generators stay where the program's would be, also past what a trace does not draw.

An operator that is not computed leaves its generator where it was, and every later number would be
another than the program's. So the generator is moved on by what the CPU's kernel draws. That takes
time in proportion to the draws, or tens of milliseconds, and nobody may ask for a number again:
meanwhile the generator has a state of another sequence, by which the place is found that it stands
for. A program may read this state, and set it again, as any other.

Kernels that draw again what they reject draw as many numbers as values say. Where these are not
known the generator's place is not known either, nor the numbers that come next.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_torchmem.interception.call import Call
from pytest_torchmem.interception.plan import Output, Plan
from pytest_torchmem.interception.values.mersenne_twister import (
    StandIn,
    draw,
    key_of,
    moved_on,
    words_drawn,
)
from pytest_torchmem.interception.values.policy import Values
from pytest_torchmem.step.generators import (
    current_generator,
    drawn_from,
    generator_on,
    set_state_of,
    state_of,
)
from pytest_torchmem.step.trees import argument_leaves
from pytest_torchmem.torch_private.keys import at_kernels

_Generator = torch.Generator

#: Words up to which a generator is moved on at once, or for any number that may be asked for.
_FEW = 1 << 12
_SOME = 1 << 16
#: Elements up to which a kernel is run to draw its numbers, on memory of its own.
_RUN = 1 << 11
_LARGEST_RUN = 1 << 22

_DISTRIBUTIONS = {
    "cauchy": ("median", "sigma"),
    "exponential": ("lambd",),
    "geometric": ("p",),
    "log_normal": ("mean", "std"),
    "normal": (),
    "rand": (),
    "rand_like": (),
    "randn": (),
    "randn_like": (),
    "uniform": (),
}
_METHODS = {
    "rand": "uniform_",
    "rand_like": "uniform_",
    "randn": "normal_",
    "randn_like": "normal_",
}
_INTEGERS = ("randint", "randint_like", "random")
#: Marked as random, and only asked what to run, or of the GPU's generator alone.
_DRAW_NOTHING = ("aten::_fused_sdp_choice", "aten::_cudnn_init_dropout_state")
_FUSED_ATTENTION = "_scaled_dot_product_"


class KernelDraws(NamedTuple):
    """What a kernel of the CPU fills with random numbers."""

    method: str
    numbers: tuple[Any, ...]
    dtype: torch.dtype
    elements: int
    dense: bool = True

    def run(self, generator: torch.Generator) -> None:
        """Draw the numbers, and keep none."""
        if self.method == "randperm":
            torch.randperm(self.elements, generator=generator)
            return
        made = torch.empty(self.elements * (1 if self.dense else 2), dtype=self.dtype)
        made = made if self.dense else made[::2]
        numbers = self.numbers
        if self.method == "bernoulli_" and not numbers:
            numbers = (torch.full((self.elements,), 0.5, dtype=self.dtype),)
        getattr(made, self.method)(*numbers, generator=generator)


class _Place(NamedTuple):
    """Where a generator would be: ``words`` draws after a state, an unknown number for ``None``."""

    state: Tensor
    words: int | None
    stand_in: StandIn
    why: str = ""


class RandomNumbers:
    """Moves the generators of one pass on."""

    def __init__(self, mode: Values, tell: Callable[[str], None], line: Callable[[], str]) -> None:
        self._mode = mode
        self._tell = tell
        self._line = line
        self._places: dict[bytes, _Place] = {}
        """By the states that stand for them."""
        self.left_out = False
        """Whether something was not drawn that another pass would draw."""

    def ready(self, call: Call, plan: Plan) -> bool:
        """Return whether an operator may draw: its generator is where the program's would be.

        In a pass that may be followed by another, large tensors that nobody decides by are not
        worth the time that this takes.
        """
        if not self._places:
            return True
        generator = generator_of(call)
        place = self._places.get(key_of(state_of(generator)))
        if place is None or not _draws(call):
            return True
        if place.words is None:
            if self._mode is Values.ASKED_FOR:
                self.left_out = True
                return False
            self._tell(
                f"random numbers after {place.why} are not those that the program would draw"
            )
            set_state_of(generator, place.state)
            return True
        if place.words > _SOME and not self._mode.wants_all and not _may_decide(call, plan):
            self.left_out = True
            return False
        with at_kernels():
            set_state_of(generator, moved_on(place.state, place.words))
        return True

    def skip(self, call: Call, plan: Plan) -> None:
        """Move the generator on by what an operator would have drawn."""
        if plan.drawn is None:
            try:
                plan.drawn = _drawn_by(call, plan) if _draws(call) else ()
            except _NotCounted:
                plan.drawn = (None,)
        for draws in plan.drawn:
            words = None if draws is None else _words_of(draws)
            self._skip(generator_of(call), draws, words, call.operator.name)

    def lose(self, why: str) -> None:
        """Take note that the program would have drawn, or not, as values say that are not known."""
        self._lose(current_generator(), why)

    def _skip(
        self, generator: torch.Generator, draws: KernelDraws | None, words: int | None, name: str
    ) -> None:
        state = state_of(generator)
        place = self._places.get(key_of(state)) if self._places else None
        if place is not None and place.words is None:
            return
        if draws is not None and draws.elements <= _LARGEST_RUN and _keeps_one(draws):
            with at_kernels():
                if place is not None:
                    set_state_of(generator, moved_on(place.state, place.words or 0))
                draws.run(generator)
        elif words is None:
            self._lose(generator, name)
        elif place is None and words <= _FEW:
            with at_kernels():
                draw(generator, words)
        elif place is None:
            self._stand_in(generator, _Place(state, words, StandIn(state)))
        else:
            self._stand_in(generator, place._replace(words=(place.words or 0) + words))

    def _lose(self, generator: torch.Generator, why: str) -> None:
        state = state_of(generator)
        place = self._places.get(key_of(state)) or _Place(state, 0, StandIn(state))
        if place.words is not None:
            why = f"{why} ({self._line() or 'the traced program'})"
            self._stand_in(generator, place._replace(words=None, why=why))

    def _stand_in(self, generator: torch.Generator, place: _Place) -> None:
        """Give a generator a state that no program has, and which stands for ``place``."""
        self._places[place.stand_in.set_anew(generator)] = place


class _NotCounted(Exception):
    """How many numbers an operator draws follows from values, or is not known here."""


def generator_of(call: Call) -> torch.Generator:
    """Return the generator that a call draws from."""
    given: Any = call.kwargs.get("generator")
    if given is None and "generator" in call.operator.argument_names:
        position = call.operator.argument_names.index("generator")
        given = call.args[position] if position < len(call.args) else None
    if given is not None:
        return drawn_from(given)
    return generator_on(None if call.device is None else call.device.device)


def _draws(call: Call) -> bool:
    """Return whether an operator draws numbers as it is called."""
    if not call.operator.random:
        return False
    named, names, name = _named(call), call.operator.argument_names, call.operator.name
    if name in _DRAW_NOTHING or name.endswith("_backward"):
        return False
    if "dropout_p" in names:
        return bool(named.get("dropout_p"))
    if name == "aten::_cudnn_rnn":
        return bool(named["dropout"]) and bool(named["train"])
    if name == "aten::native_dropout":
        return named["train"] is not False
    return "training" not in names or bool(named.get("training"))


def _named(call: Call) -> dict[str, Any]:
    return {**dict(zip(call.operator.argument_names, call.args, strict=False)), **call.kwargs}


def _may_decide(call: Call, plan: Plan) -> bool:
    """Return whether a program is likely to ask for what is drawn: a number, or integers."""
    dtype, elements, _ = _filled_by(call, plan)
    return elements <= 1 or not (dtype.is_floating_point or dtype.is_complex)


def _filled_by(call: Call, plan: Plan) -> tuple[torch.dtype, int, bool]:
    """Return type and elements of what is drawn, and whether it is contiguous."""
    for output in argument_leaves(plan.outputs, Output):
        return output.dtype, math.prod(output.shape), True
    if not call.tensors:
        return torch.float32, 0, True
    tensor = call.tensors[0]
    return tensor.dtype, tensor.numel(), tensor.is_contiguous()


def _drawn_by(call: Call, plan: Plan) -> tuple[KernelDraws, ...]:
    """Return what the CPU's kernels draw for an operator. Raises ``_NotCounted``."""
    named, name = _named(call), call.operator.name.removeprefix("aten::").partition(".")[0]
    base = name.rstrip("_").removesuffix("_functional")
    dtype, elements, dense = _filled_by(call, plan)
    if base in _DISTRIBUTIONS:
        if dtype.is_complex:  # of its real and imaginary parts
            dtype, elements = dtype.to_real(), 2 * elements
        numbers = tuple(named[one] for one in _DISTRIBUTIONS[base] if one in named)
        return (KernelDraws(_METHODS.get(base, f"{base}_"), numbers, dtype, elements, dense),)
    if base in _INTEGERS:
        limits = (named.get("low", named.get("from")), named.get("high", named.get("to")))
        numbers = () if limits[1] is None else (limits[0] or 0, limits[1])
        return (KernelDraws("random_", numbers, dtype, elements),)
    if base == "randperm":
        return (KernelDraws("randperm", (), dtype, elements),)
    if base == "bernoulli":
        if call.operator.name.endswith((".float", ".p")):
            return (KernelDraws("bernoulli_", (named.get("p", 0.5),), dtype, elements),)
        return (KernelDraws("bernoulli_", (), named.get("p", named["self"]).dtype, elements),)
    if base == "native_dropout":
        return (KernelDraws("bernoulli_", (1 - named["p"],), torch.bool, elements),)
    if base == "multinomial":
        return (_drawn_samples(named),)
    if name.startswith(_FUSED_ATTENTION):
        # The CPU drops weights of its own formula; native/transformers/attention.cpp.
        query, key = named["query"], named["key"]
        weights = query.numel() // query.shape[-1] * key.shape[-2]
        return (KernelDraws("bernoulli_", (1 - named["dropout_p"],), query.dtype, weights),)
    if name == "_cudnn_rnn":
        # One dropout behind each layer but the last; native/RNN.cpp, apply_layer_stack.
        between = KernelDraws("bernoulli_", (1 - named["dropout"],), dtype, elements)
        return (between,) * int(named["num_layers"] - 1)
    raise _NotCounted


def _drawn_samples(named: dict[str, Any]) -> KernelDraws:
    """Return what ``multinomial`` draws: native/Distributions.cpp, multinomial_out, and
    native/cpu/MultinomialKernel.cpp.
    """
    chances, samples = named["self"], named["num_samples"]
    if named.get("replacement") and samples > 1:
        rows = chances.numel() // max(1, chances.shape[-1])
        return KernelDraws("uniform_", (), torch.float64, rows * samples)
    return KernelDraws("exponential_", (), chances.dtype, chances.numel())


def _keeps_one(draws: KernelDraws) -> bool:
    """Return whether a kernel may leave a normal number to the next, or begin with such a one."""
    serial = draws.elements < 16 or not draws.dense
    return draws.method == "log_normal_" or (draws.method == "normal_" and serial)


@lru_cache(maxsize=1024)
def _words_of(draws: KernelDraws) -> int | None:
    """Return how many words a kernel draws, ``None`` if that does not follow from its elements.

    Its build and the machine decide: bernoulli_ draws one word with MKL on an Intel processor, and
    two for each element elsewhere (native/cpu/DistributionKernels.cpp). So it is asked.
    """
    if _keeps_one(draws):
        return None
    if draws.elements <= _RUN:
        return _words_when_run(draws)
    rest = draws.elements % 16  # normal_ fills in vectors of 16
    few = _words_when_run(draws._replace(elements=_RUN + rest))
    more = _words_when_run(draws._replace(elements=2 * _RUN + rest))
    if few is None or more is None:
        return None
    each, left = divmod((more - few) * (draws.elements - rest - _RUN), _RUN)
    return None if left else few + each


def _words_when_run(draws: KernelDraws) -> int | None:
    generator = _Generator().manual_seed(0)
    before = generator.get_state()
    with at_kernels():
        draws.run(generator)
        return words_drawn(before, generator.get_state(), most=8 * draws.elements + 64)
