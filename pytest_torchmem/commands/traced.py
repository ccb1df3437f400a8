"""``torchmem trace``: the memory of a function, outside of tests, and every format of it.

``torchmem html``: the page of a profile that was saved.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_torchmem.commands.arguments import load_function, print_profile, returns_module
from pytest_torchmem.commands.console import elapsed
from pytest_torchmem.errors import UsageError
from pytest_torchmem.printable import printable

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile

_WRITERS: tuple[tuple[str, str, Callable[[MemoryProfile, Path], object]], ...] = (
    ("html", "a page for browsers", lambda profile, path: profile.to_html(path)),
    ("svg", "a picture", lambda profile, path: profile.to_svg(path)),
    ("json", "the profile, for torchmem html", lambda profile, path: profile.save(path)),
    ("csv", "a row for each allocation", lambda profile, path: profile.to_csv(path)),
    ("perfetto", "for Perfetto", lambda profile, path: profile.to_trace_events(path)),
    (
        "memory-snapshot",
        "for https://pytorch.org/memory_viz",
        lambda profile, path: profile.to_memory_snapshot(path),
    ),
)


def add_commands(commands: Any) -> None:
    """Add both commands to the parser's."""
    trace = commands.add_parser(
        "trace",
        help="trace a function and print its memory",
        description="Trace FUNCTION, which takes no arguments and runs a step (build the model, "
        "forward, backward, optimizer) or returns a module and its inputs, and print its memory. "
        "No GPU is needed.",
    )
    trace.add_argument(
        "function", metavar="FUNCTION", help="package.module:function or file.py:function"
    )
    trace.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=None,
        help="default: cpu, or cuda where --gpu or --memory is given",
    )
    trace.add_argument("--gpu", metavar="NAME", help="the GPU to model, such as h100")
    trace.add_argument("--memory", metavar="SIZE", help="limit the GPU's memory, such as 16GiB")
    trace.add_argument(
        "--allocator",
        metavar="OPTIONS",
        default="",
        help="options of the CUDA allocator, as in PYTORCH_ALLOC_CONF",
    )
    trace.add_argument(
        "--values",
        choices=("auto", "real", "none"),
        default="auto",
        help="values of tensors to compute: auto (default: where the program decides by them), "
        "real (all), none",
    )
    trace.add_argument(
        "--largest",
        metavar="N",
        type=int,
        default=10,
        help="how many of the largest allocations to print (default: 10)",
    )
    for name, text, _ in _WRITERS:
        trace.add_argument(f"--{name}", metavar="FILE", type=Path, help=f"write {text}")
    trace.set_defaults(run=_trace)
    html = commands.add_parser(
        "html",
        help="write the page of a saved profile",
        description="Write the page of PROFILE, which torchmem trace --json or profile.save wrote.",
    )
    html.add_argument("profile", metavar="PROFILE", type=Path, help="the profile to show")
    html.add_argument("--before", metavar="PROFILE", type=Path, help="a profile to compare it with")
    html.add_argument(
        "--output", "-o", metavar="FILE", type=Path, required=True, help="the page to write"
    )
    html.set_defaults(run=_html)


def _trace(options: argparse.Namespace) -> int:
    function = load_function(options.function)
    from pytest_torchmem.graphs.build import trace_built
    from pytest_torchmem.tracing.trace import trace

    device = options.device or ("cuda" if options.gpu or options.memory else "cpu")
    given = {"gpu": options.gpu, "memory": options.memory}
    if device == "cpu" and any(given.values()):
        raise UsageError("--gpu and --memory are for --device cuda")
    where = {name: value for name, value in given.items() if value}
    where |= {"device": device, "allocator": options.allocator, "values": options.values}
    with elapsed(f"tracing {options.function} on {device}"):
        returned: list[bool] = []
        profile = trace(lambda: _noting(function(), returned), **where)
        if returned[-1]:
            profile = trace_built(function, {}, **where)
    if device == "cuda" and not profile.timeline.allocations:
        raise UsageError(
            f"nothing was allocated on cuda: {options.function} makes everything on the CPU. Make "
            'the model and its inputs with device="cuda", or let it return them (return model, x): '
            "they are moved"
        )
    written = [*_written(options, profile)]  # whatever becomes of what is printed
    print_profile(profile, options.largest)
    for file in written:
        print(printable(f"written: {file}"))
    return 0


def _noting(result: object, returned: list[bool]) -> object:
    """Return what a function returned, and take note of whether that is a module to be run."""
    returned.append(returns_module(result))
    return result


def _written(options: argparse.Namespace, profile: MemoryProfile) -> Iterator[Path]:
    for name, _, write in _WRITERS:
        path = getattr(options, name.replace("-", "_"))
        if path is not None:
            write(profile, path)
            yield path


def _html(options: argparse.Namespace) -> int:
    from pytest_torchmem.profile.profile import MemoryProfile

    before = MemoryProfile.load(options.before) if options.before is not None else None
    MemoryProfile.load(options.profile).to_html(options.output, before=before)
    print(printable(f"written: {options.output}"))
    return 0
