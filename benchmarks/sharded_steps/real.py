"""Programs in real processes, which are counted by ``measure`` and talk to each other by gloo.

    python -m benchmarks.sharded_steps.real DIRECTORY NAME...

is one of them, started with ``torchrun``'s variables.
"""

import functools
import os
import pickle
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from pytest_torchmem.profile.profile import MemoryProfile, figures_of
from pytest_torchmem.profile.timeline import Timeline

_OF_GLOO = ("c10d::", "gloo:")
_PATIENCE = 0.01
"""Seconds that a thread of gloo is given to let go of what it has sent."""
_ROOT = Path(__file__).parents[2]


def run(names: Sequence[str], world_size: int, directory: Path) -> dict[str, list[MemoryProfile]]:
    """Run programs in ``world_size`` processes; return the profiles of the ranks by program."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "benchmarks.sharded_steps.real", str(directory), *names]
    processes = [
        subprocess.Popen(command, env={**shared, "RANK": rank, "LOCAL_RANK": rank}, cwd=_ROOT)
        for rank in map(str, range(world_size))
    ]
    try:
        codes = [process.wait(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"processes ended with {codes}")
    return {
        name: [
            pickle.loads(_file(directory, name, rank).read_bytes()) for rank in range(world_size)
        ]
        for name in names
    }


def without_gloo(profile: MemoryProfile) -> MemoryProfile:
    """Return a measured profile without the buffers that gloo takes.

    They come and go when its threads get to it.
    """
    timeline = profile.timeline
    of_gloo = {
        number
        for number, found in enumerate(timeline.allocations, start=1)
        if any(part.startswith(_OF_GLOO) for part in found.label.split(" > "))
    }
    events: list[int] = []
    places = [0]
    for event in timeline.events:
        if abs(event) not in of_gloo:
            events.append(event)
        places.append(len(events))
    phases = tuple((places[start], phase) for start, phase in timeline.phases)
    own = Timeline(timeline.allocations, tuple(events), phases)
    return replace(profile, timeline=own, **figures_of(own))


def _let_gloo_finish() -> None:
    """Let what waits for collectives return when gloo's threads hold their tensors no more.

    A thread of gloo says that a collective is done before it lets go of it (ProcessGroupGloo.cpp,
    ``runLoop``). A backward waits for those that the reducer starts in C++. What is called back
    with a result is called by the thread that asks for that, as by NCCL: of what is taken and given
    back on a thread of gloo the record sees nothing.
    """
    kind: Any = torch._C.Future
    then = kind.then

    def call_here(future: Any, callback: Any) -> Any:
        future.wait()
        return then(future, callback)

    kind.then = call_here

    def finished(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            time.sleep(_PATIENCE)
            return found

        return call

    for owner, name in (
        (dist.Work, "wait"),
        (functional, "wait_tensor"),
        (torch.Tensor, "backward"),
        (dist, "_broadcast_coalesced"),  # parameters, when a model is wrapped
        (torch._C._distributed_c10d.Reducer, "_rebuild_buckets"),
        # All processes have begun a collective that nobody waits for.
        (DistributedDataParallel, "_check_global_requires_backward_grad_sync"),
    ):
        setattr(owner, name, finished(getattr(owner, name)))


def _file(directory: Path, name: str, rank: int) -> Path:
    return directory / f"{name}.{rank}.pickle"


def _main(directory: Path, names: Sequence[str]) -> None:
    from benchmarks.sharded_steps.programs import PROGRAMS
    from pytest_torchmem import measure

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    _let_gloo_finish()
    for name in names:
        profile = measure(PROGRAMS[name])
        _file(directory, name, dist.get_rank()).write_bytes(pickle.dumps(profile))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2:])
