"""Hold traces against figures of memory that others published of real GPUs.

python -m benchmarks.truth.published.peaks                   every figure of ``figures.json``
python -m benchmarks.truth.published.peaks --only Mistral    those whose name matches

Not recordings but single figures, of programs that are public: how much was allocated or reserved
at most. Each program is written out and traced from the start of its process. An error is traced
minus published; it is +0 where the traced figure, rounded as the published one is, is the same.

What is reserved depends on the addresses that the driver gives: between two free blocks of one size
the lower decides. A trace puts each segment behind all earlier ones; ``--orders 20`` also sends its
requests through the replay with segments in twenty random orders.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tabulate import tabulate

import pytest_torchmem as torchmem
from benchmarks import command
from benchmarks.truth.published import gpt, mistral, selection, t5
from benchmarks.truth.published.programs import Program
from benchmarks.truth.published.vision_transformer import Setting, fine_tuning
from pytest_torchmem import MemoryProfile
from pytest_torchmem.allocator.caching import CachingAllocator
from pytest_torchmem.allocator.device_memory import Addresses, Block

_LIST = Path(__file__).with_name("figures.json")
_UNITS = {"GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure of one program."""

    name: str
    program: str
    """The program's key in ``PROGRAMS``."""
    quantity: str
    """``allocated`` or ``reserved``: ``torch.cuda.max_memory_allocated`` or ``_reserved``."""
    published: str
    """As it is written there."""
    unit: str
    torch: str
    """The version, "" where the source does not say."""
    gpu: str
    """The one it is traced for: the source's, or one of its kind where it names none."""
    repository: str
    commit: str
    path: str
    licence: str

    @property
    def nbytes(self) -> int:
        """The published figure in bytes."""
        return round(float(self.published) * _UNITS[self.unit])

    def error(self, traced: int) -> int:
        """Return how many bytes ``traced`` is off, 0 where only the rounding is between them."""
        decimals = len(self.published.partition(".")[2])
        same = f"{traced / _UNITS[self.unit]:.{decimals}f}" == self.published
        return 0 if same else traced - self.nbytes

    def text(self, nbytes: int) -> str:
        """Return bytes as the figure is written; figures with all their digits are bytes."""
        decimals = len(self.published.partition(".")[2])
        if decimals > 6:
            return f"{nbytes:,}"
        return f"{nbytes / _UNITS[self.unit]:.{decimals}f} {self.unit}"


def figures() -> list[Figure]:
    """Return every published figure of the list."""
    return [Figure(**entry) for entry in json.loads(_LIST.read_text())]


_VARIANTS = {
    "baseline": gpt.Variant(),
    "1": gpt.Variant(masks_kept=False),
    "3": gpt.Variant(False, fused=True),
    "5": gpt.Variant(False, True, bfloat16=True),
    "6": gpt.Variant(False, True, True, native=True),
    "7": gpt.Variant(False, True, True, True, one_kernel=True),
}
_SETTINGS = {
    "01": Setting(),
    "02": Setting(precision="float16 mixed"),
    "03": Setting(precision="bfloat16"),
    "04": Setting(16, "bfloat16"),
    "05": Setting(4, "bfloat16", accumulated=4),
    "06": Setting(4, "bfloat16", accumulated=4, adam=False),
}
_CASES = ("All", "Norm", "Input", "Input (BN Eval)")
_NETWORKS = ("resnet101", "resnext101_64x4d", "efficientnet_v2_l")

PROGRAMS: Mapping[str, Callable[[], Program]] = {
    **{f"gpt/{step}": partial(gpt.training, variant) for step, variant in _VARIANTS.items()},
    **{f"vit/{script}": partial(fine_tuning, setting) for script, setting in _SETTINGS.items()},
    **{
        f"{network}/{case}": partial(selection.images, network, case)
        for network in _NETWORKS
        for case in _CASES
    },
    **{
        f"t5/{case}": partial(selection.words, t5.T5, case, 64, t5.WIDTH, t5.VOCABULARY)
        for case in _CASES
    },
    **{
        f"mistral-7b/{case}": partial(
            selection.words, mistral.Mistral, case, 16, mistral.WIDTH, mistral.VOCABULARY
        )
        for case in _CASES
    },
}
"""What makes a program, by its key."""

FORMER: Mapping[str, Callable[[], Program]] = {
    f"vit/{script}": partial(fine_tuning, setting, True) for script, setting in _SETTINGS.items()
}
"""The same with what the torch of the recording did otherwise written into the program."""


class _Scattered(Addresses):
    """Segments lie in a random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance, self._places = random.Random(seed), set[int]()

    def take(self, size: int) -> int:
        """Return an address with room for any segment behind it."""
        place = 0
        while not place or place in self._places:
            place = self._chance.randrange(1 << 40)
        self._places.add(place)
        return place << 46

    def give_back(self, address: int, size: int) -> None:
        """Do nothing."""


def traced(program: Program, gpu: str) -> MemoryProfile:
    """Return a program's trace on a GPU that does not run out."""
    return torchmem.trace(program, device="cuda", gpu=gpu, memory="unlimited")


def peak(profile: MemoryProfile, quantity: str) -> int:
    """Return a trace's peak in bytes, of what is ``allocated`` or ``reserved``."""
    return int(getattr(profile.allocator_peaks()["peak"], quantity))


def scattered(profile: MemoryProfile, seed: int) -> int:
    """Return the reserved peak of a trace's requests with segments in a random order, in bytes."""
    allocator, blocks, highest = CachingAllocator(), dict[int, Block | None](), 0
    allocator.addresses = _Scattered(seed)
    for event in profile.timeline.events:
        if event > 0:
            nbytes = profile.timeline.allocations[event - 1].nbytes
            blocks[event] = allocator.allocate(nbytes) if nbytes else None
            highest = max(highest, allocator.reserved)
        elif event < 0 and (block := blocks.pop(-event)) is not None:
            allocator.free(block)
    return highest


def table(found: Sequence[Figure], orders: int = 0) -> str:
    """Return figures beside their traces, reserved ones also with ``orders`` random addresses."""
    rows = []
    for figure in found:
        try:
            profile = traced(PROGRAMS[figure.program](), figure.gpu)
        except ModuleNotFoundError as error:
            print(f"left out: {figure.name}: {error}")
            continue
        then = figure.program in FORMER and traced(FORMER[figure.program](), figure.gpu)
        nbytes = peak(profile, figure.quantity)
        others = ""
        if orders and figure.quantity == "reserved":
            among = sorted(scattered(then or profile, seed) for seed in range(orders))
            others = f"{_relative(figure, among[0])} to {_relative(figure, among[-1])}"
        rows.append(
            (
                figure.name,
                figure.torch or "?",
                figure.quantity,
                figure.text(figure.nbytes),
                figure.text(nbytes),
                f"{figure.error(nbytes):+,}",
                _relative(figure, nbytes),
                _relative(figure, peak(then, figure.quantity)) if then else "",
                *([others] if orders else []),
            )
        )
    headers = ["program", "torch", "", "published", "traced", "error", "", "as torch was then"]
    headers += ["with other addresses"] if orders else []
    return tabulate(rows, headers=headers, disable_numparse=True)


def _relative(figure: Figure, nbytes: int) -> str:
    return f"{figure.error(nbytes) / figure.nbytes:+.3%}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison."""
    parser = command("truth.published.peaks", __doc__)
    parser.add_argument("--only", default="", help="regular expression for the figures' names")
    parser.add_argument("--orders", type=int, default=0, help="random orders of segments")
    options = parser.parse_args(arguments)
    print(table([one for one in figures() if re.search(options.only, one.name)], options.orders))
    return 0


if __name__ == "__main__":
    sys.exit(main())
