"""The table of ``torchmem cudnn``: what cuDNN takes for each layer of a step, on several GPUs."""

import itertools
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_torchmem.cudnn.questions import PREFIX, VARIABLE, find_installed, version_text
from pytest_torchmem.errors import UnknownValueError, UsageError
from pytest_torchmem.reports.layout import table
from pytest_torchmem.targets.gpus import LibraryAnswer, WorkspaceKey
from pytest_torchmem.units import format_size

_ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_REST = 512
"""What may be left of a workspace that consists of copies: bytes for alignment and counters."""


@dataclass(frozen=True, slots=True)
class Column:
    """One GPU as one version of cuDNN sees it, and its answers."""

    gpu: str
    version: str
    answers: dict[WorkspaceKey, LibraryAnswer]


def columns(step: Callable[[], Any], gpus: Sequence[str], places: Sequence[str]) -> list[Column]:
    """Trace a step for each GPU with the cuDNN of each of these places.

    ``step`` returns a module, or a module and its inputs, whose step is traced; if it returns
    anything else, it is the step itself. Raises ``UsageError`` where there is no cuDNN.
    """
    made = _model_of(step, "meta")
    places = places or [os.environ.get(VARIABLE, "")]
    try:
        return _traced(made or (step,), gpus, places)
    except UnknownValueError:
        made = _model_of(step, "cpu") if made else None
        if made is None:
            raise
        return _traced(made, gpus, places)  # what the model decides by needs values


def _traced(target: tuple[Any, ...], gpus: Sequence[str], places: Sequence[str]) -> list[Column]:
    from pytest_torchmem.journal.journal import variables
    from pytest_torchmem.tracing.trace import trace

    found = []
    for place in places:
        with variables({VARIABLE: place}, all_of_them=False):
            installed = find_installed()
            if isinstance(installed, str):
                raise UsageError(installed)
            version = version_text(installed.version)
            for gpu in gpus:
                profile = trace(*target, device="cuda", gpu=gpu, memory="unlimited")
                answers = {answer.question: answer for answer in profile.library_answers}
                found.append(Column(profile.gpu or gpu, version, answers))
    return found


def _model_of(step: Callable[[], Any], device: str) -> tuple[Any, ...] | None:
    """Return a module with its inputs if that is what the function returns, on a device."""
    import torch
    from torch import nn

    try:
        with torch.device(device):
            made = step()
    except Exception:  # a step of its own, which wants a GPU; the trace shows what is wrong
        return None
    made = made if isinstance(made, tuple) else (made,)
    return made if made and isinstance(made[0], nn.Module) else None


def render(found: Sequence[Column], width: int = 80) -> str:
    """Return the table: a row for each question, the largest workspace first.

    Where it has no room in so many columns, each row is a few lines, one for each GPU.
    """

    def largest(key: WorkspaceKey) -> int:
        return max(one.answers[key].nbytes or 0 for one in found if key in one.answers)

    versions = {column.version for column in found}
    heads = [
        f"{column.gpu}, {column.version}" if len(versions) > 1 else column.gpu for column in found
    ]
    keys = dict.fromkeys(key for column in found for key in column.answers)
    if not keys:
        return "cuDNN was asked nothing: the step has no convolution or attention for it\n"
    rows = [_row(key, found) for key in sorted(keys, key=largest, reverse=True)]
    text = table(rows, ("layer", "", "x, w, y or query", *heads))
    if max(map(len, text.splitlines())) > width:
        text = "\n".join(_lines(row, heads, width) for row in rows)
    missing = sorted(
        {a.why for column in found for a in column.answers.values() if a.nbytes is None}
    )
    notes = [f"cuDNN {', '.join(sorted(versions))}", *(f"no answer: {why}" for why in missing)]
    return f"{text}\n" + "\n".join(_folded(note, width) for note in notes) + "\n"


def _lines(row: Sequence[str], heads: Sequence[str], width: int) -> str:
    """Return a row as lines: the layer, of which a long name has its end, and what there is."""
    layer, direction, geometry, *cells = row
    room = width - len(direction) - 2
    if len(layer) > room:
        layer = "…" + layer[1 - room :]
    longest = max(map(len, heads))
    answers = [f"  {head.ljust(longest)}  {cell}" for head, cell in zip(heads, cells, strict=True)]
    first = f"{layer}  {direction}" if layer else direction
    return "\n".join([first, _folded(f"  {geometry}", width), *answers])


def _folded(text: str, width: int) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(
        text.strip(), width, initial_indent=indent, subsequent_indent=f"{indent}  "
    )


def _row(key: WorkspaceKey, found: Sequence[Column]) -> tuple[str, ...]:
    modules = [column.answers[key].modules for column in found if key in column.answers]
    names = list(dict.fromkeys(name for names in modules for name in names))
    more = f" (+{len(names) - 1})" if len(names) > 1 else ""
    direction = key.operator.removeprefix(PREFIX).removeprefix("convolution_").replace("_", " ")
    cells = (_cell(column.answers.get(key)) for column in found)
    return (f"{names[0]}{more}" if names else "", direction, _geometry(key), *cells)


def _cell(answer: LibraryAnswer | None) -> str:
    if answer is None:
        return "not cuDNN's"
    if answer.nbytes is None:
        return "no answer"
    if "benchmark" in answer.question.geometry.partition(";")[2]:  # of all candidates
        return f"at most {format_size(answer.nbytes)}"
    engine = f" engine {answer.engine}" if answer.engine >= 0 else ""
    copied = made_of(answer)
    return f"{format_size(answer.nbytes)}{engine}" + (f": {copied}" if copied else "")


def _geometry(key: WorkspaceKey) -> str:
    operands = _operands(key)
    formats = {"channels last" for text in operands if "@" in text}
    shapes = [text.partition("@")[0].partition(" ")[0] for text in operands]
    lists = ["[" + text.partition("[")[2] for text in shapes[1:]]
    return " ".join([shapes[0], *lists, *formats])


def _operands(key: WorkspaceKey) -> list[str]:
    """Return the tensors of a question as text; a question has three or more."""
    parts = key.geometry.partition(";")[0].split(", ")
    return [part.partition("=")[2] or part for part in parts if not part.startswith("[")]


def made_of(answer: LibraryAnswer) -> str:
    """Return which copies of its operands a convolution's workspace consists of, if it does.

    cuDNN brings operands that are contiguous into channels last, and others into another type.
    """
    if not answer.nbytes or "convolution" not in answer.question.operator:
        return ""
    sizes = [_size(text) for text in _operands(answer.question)]
    found = []
    for counts in itertools.product(range(3), repeat=3):
        rest = answer.nbytes - sum(n * size for n, size in zip(counts, sizes, strict=True))
        if any(counts) and 0 <= rest <= _REST:
            found.append((rest, sum(counts), max(counts), counts))
    if not found:
        return ""
    named = [(n, name) for n, name in zip(min(found)[-1], "xwy", strict=True) if n]
    return " + ".join(f"{n} {name}" if n > 1 else name for n, name in named)


def _size(operand: str) -> int:
    dtype, _, rest = operand.partition("[")
    return _ITEM_SIZES[dtype] * math.prod(map(int, rest.partition("]")[0].split(",")))
