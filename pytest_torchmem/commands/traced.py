"""``torchmem trace`` and ``torchmem advise``: the memory of a step outside of tests, and what would
lower it. ``torchmem html``: the page of a profile that was saved. ``torchmem stand-in``: a command
whose torch finds a GPU of the catalogue, without a GPU.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_torchmem.commands.console import elapsed, load_function, print_profile
from pytest_torchmem.errors import UsageError
from pytest_torchmem.figures import label
from pytest_torchmem.printable import printable
from pytest_torchmem.stand_in.environment import stand_in_environment
from pytest_torchmem.targets.gpus import DEFAULT_GPU, find_gpu
from pytest_torchmem.units import format_count, format_size, parse_size

_WRITERS = (
    ("html", "to_html", "a page for browsers"),
    ("svg", "to_svg", "a picture"),
    ("json", "save", "the profile, for torchmem html"),
    ("csv", "to_csv", "a row for each allocation"),
    ("perfetto", "to_trace_events", "for Perfetto"),
    ("memory-snapshot", "to_memory_snapshot", "for https://pytorch.org/memory_viz"),
)
"""Options, methods of a profile, and what they write."""
_OF_MODULES = ("optimizer", "mode")
"""Options of the step that is made of a module."""


def add_commands(commands: Any) -> None:
    trace = commands.add_parser(
        "trace",
        help="trace a step and print its memory",
        description="Trace STEP and print its memory. No GPU is needed.",
    )
    _add_step(trace, None)
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
    for name, _, text in _WRITERS:
        trace.add_argument(f"--{name}", metavar="FILE", type=Path, help=f"write {text}")
    trace.set_defaults(run=_trace)
    advise = commands.add_parser(
        "advise",
        help="print changes that would lower the peak of a training step",
        description="Trace changes of a training step, and print those that lower its peak: the "
        "bytes that they save and the operations that they cost.",
    )
    _add_step(advise, "cuda")
    advise.add_argument("--budget", metavar="SIZE", help="what the peak has to fit: '2 GiB'")
    advise.set_defaults(run=_advise)
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


def _add_step(command: argparse.ArgumentParser, device: str | None) -> None:
    """Add what says which step is traced, and where."""
    command.add_argument(
        "step",
        metavar="STEP",
        help="package.module:function or file.py:function, without arguments: it runs a step "
        "(builds the model, forward, backward, optimizer), or returns a module and its inputs as a "
        "tuple, whose last part may be a dictionary of keyword arguments. Or a model by name: "
        "hf:NAME, timm:NAME, torchvision:NAME",
    )
    of_name = command.add_argument_group("of a model by name")
    of_name.add_argument("--batch", metavar="N", type=int, default=1, help="default: 1")
    of_name.add_argument("--sequence", metavar="N", type=int, default=512, help="default: 512")
    command.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default=device,
        help=f"default: {device or 'cpu, or cuda where --gpu or --memory is given'}",
    )
    command.add_argument("--gpu", metavar="NAME", help="the GPU to model, such as h100")
    command.add_argument("--optimizer", metavar="NAME", help="of torch.optim, such as AdamW")
    command.add_argument("--steps", metavar="N", type=int, default=1, help="default: 1")
    command.add_argument(
        "--mode", choices=("eager", "aot", "inductor"), help="how compiled code runs"
    )
    command.add_argument(
        "--world-size", metavar="N", type=int, help="processes of a distributed program"
    )


def _options(options: argparse.Namespace) -> tuple[Callable[[], object], dict[str, Any]]:
    """Return the function that a command names, and the options of its trace that were given."""
    given = {
        name: getattr(options, name)
        for name in ("device", "gpu", "steps", "mode", "world_size")
        if getattr(options, name) is not None
    }
    if options.optimizer is not None:
        from torch import optim

        optimizer = getattr(optim, options.optimizer, None)
        if not isinstance(optimizer, type) or optim.Optimizer not in optimizer.__mro__[1:]:
            raise UsageError(f"--optimizer {options.optimizer}: torch.optim has none of that name")
        given["optimizer"] = optimizer
    return load_function(options.step, options.batch, options.sequence), given


def _trace(options: argparse.Namespace) -> int:
    if options.device is None:
        options.device = "cuda" if options.gpu or options.memory else "cpu"
    if options.device == "cpu" and (options.gpu or options.memory):
        raise UsageError("--gpu and --memory are for --device cuda")
    function, where = _options(options)
    from torch import nn

    from pytest_torchmem.graphs.fitting import trace_built
    from pytest_torchmem.tracing.trace import trace

    returns_module: list[bool] = []

    def noting() -> object:
        result = function()
        first = result[0] if isinstance(result, tuple) and result else result
        returns_module.append(isinstance(first, nn.Module))
        return result

    where |= {"allocator": options.allocator, "values": options.values, "memory": options.memory}
    of_module = {name: where.pop(name) for name in _OF_MODULES if name in where}
    with elapsed(f"tracing {options.step} on {options.device}"):
        profile = trace(noting, **where)
        if returns_module[-1]:
            profile = trace_built(function, {}, **where, **of_module)
        elif of_module:
            raise UsageError(
                f"--{' and --'.join(of_module)}: {options.step} runs its step itself. Let it "
                "return the module and its inputs (return model, x)"
            )
    if not profile.timeline.allocations:
        why = ": let it run a step, or return a module and its inputs (return model, x)"
        if options.device == "cuda":
            why = (
                ': it makes everything on the CPU. Make the model and its inputs with device="cuda"'
                ", or let it return them (return model, x): they are moved"
            )
        raise UsageError(f"{options.step} allocates nothing on {options.device}{why}")
    paths = [(method, getattr(options, name.replace("-", "_"))) for name, method, _ in _WRITERS]
    written = [(method, path) for method, path in paths if path is not None]
    for method, path in written:  # whatever becomes of what is printed
        getattr(profile, method)(path)
    print_profile(profile, options.largest)
    for _, path in written:
        print(printable(f"written: {path}"))
    return 0


def _advise(options: argparse.Namespace) -> int:
    from tabulate import tabulate

    from pytest_torchmem.graphs.fitting import trace_built

    budget = None if options.budget is None else parse_size(options.budget)
    function, where = _options(options)
    profile = trace_built(function, {}, **where, memory="unlimited")
    with elapsed("tracing changes"):
        found = profile.suggestions(budget)
    allowed = "" if budget is None else f", the budget {format_size(budget)}"
    print(f"{profile.name}: the peak is {format_size(profile.peak)}{allowed}")
    if not found:
        print("nothing that was tried lowers it")
        return 0
    rows = [
        (
            printable(one.change),
            format_size(one.saved),
            format_size(getattr(one.profile, one.figure)),
            format_count(one.flops),
            label(one.figure),
        )
        for one in found
    ]
    headers = ("change", "saves", "leaves", "operations", "of the")
    print(tabulate(rows, headers, disable_numparse=True))
    if budget is not None and min(profile.peak, *(one.profile.peak for one in found)) > budget:
        print("none of these is enough")
    return 0


def _html(options: argparse.Namespace) -> int:
    from pytest_torchmem.profile.profile import MemoryProfile

    before = MemoryProfile.load(options.before) if options.before is not None else None
    MemoryProfile.load(options.profile).to_html(options.output, before=before)
    print(printable(f"written: {options.output}"))
    return 0


def add_stand_in(commands: Any) -> None:
    stand_in = commands.add_parser(
        "stand-in",
        help="run a command in which the CUDA build of torch finds a GPU that is not there",
        usage="torchmem stand-in [-h] [--gpu GPU] [--devices N] -- COMMAND ...",
        description="Run COMMAND with a stand-in for the CUDA runtime: torch's own CUDA code and "
        "its allocator run and count memory, kernels compute nothing. It needs a CUDA build of "
        "torch on Linux, and is compiled at first use.",
    )
    stand_in.add_argument("--gpu", metavar="GPU", default=DEFAULT_GPU, help="default: %(default)s")
    stand_in.add_argument("--devices", metavar="N", type=int, default=1, help="default: 1")
    stand_in.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    stand_in.set_defaults(run=_stand_in)


def _stand_in(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("torchmem stand-in needs a command: torchmem stand-in -- python step.py")
    environment = stand_in_environment(find_gpu(options.gpu), options.devices)
    sys.stdout.flush()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise UsageError(f"torchmem stand-in: {command[0]}: {error.strerror}") from None
