"""``torchmem stand-in``: a command whose torch finds a GPU of the catalogue, without a GPU."""

import argparse
import os
import sys
from typing import Any

from pytest_torchmem.errors import UsageError
from pytest_torchmem.stand_in.environment import stand_in_environment
from pytest_torchmem.targets.gpus import DEFAULT_GPU, find_gpu


def add_command(commands: Any) -> None:
    """Add the command to the parser's."""
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
