"""Trace small programs under several installations of torch: each runs everywhere, or is listed.

python -m benchmarks.versions torch-2.11/bin/python torch-2.15/bin/python
python -m benchmarks.versions torch-2.15/bin/python --only compile

The programs reach every part of torch that a trace replaces something of, once they are imported:
what a version has renamed there would stop every trace. Figures may differ where torch does.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from benchmarks import command
from pytest_torchmem import trace

WIDTH = 64
_MARK = "result: "


def _convolutions(device: Any) -> int:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    images = torch.randn(2, 3, 8, 8)
    return trace(nn.Sequential(*layers), images, device=device, optimizer=torch.optim.AdamW).peak


def _attention(device: Any) -> int:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return trace(layer, torch.randn(2, 8, 32), device=device, optimizer=torch.optim.SGD).peak


def _recurrent(device: Any) -> int:
    return trace(nn.LSTM(8, 8), torch.randn(2, 3, 8), device=device).peak


def _everything_imported(device: Any) -> int:
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    return trace(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH), device=device).peak


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to("cuda")


def _fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    model = _layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, WIDTH, device="cuda")).sum().backward()
    optimizer.step()


def _replicated() -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    model = nn.parallel.DistributedDataParallel(_layers(), device_ids=[0])
    model(torch.randn(4, WIDTH, device="cuda")).sum().backward()


def _tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = parallelize_module(layers.cuda(), init_device_mesh("cuda", (4,)), styles)
    model(torch.randn(4, WIDTH, device="cuda")).sum().backward()
    torch.optim.AdamW(model.parameters()).step()


def _pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("nccl")
    stage = PipelineStage(_layers(), dist.get_rank(), 4, torch.device("cuda"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    batch = torch.randn(8, WIDTH, device="cuda")
    if stage.is_first:
        schedule.step(batch)
    else:
        schedule.step(target=batch if stage.is_last else None)


def _compiled() -> None:
    torch.compile(_layers())(torch.randn(4, WIDTH, device="cuda")).sum().backward()


def _flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = (torch.randn(1, 2, 128, 16, device="cuda") for _ in range(3))
    flex_attention(query, key, value)


def _jagged(device: Any) -> int:
    sequences = [torch.randn(length, WIDTH) for length in (5, 3)]
    projection = nn.Linear(WIDTH, WIDTH)

    def step() -> None:
        placed = [sequence.to(device) for sequence in sequences]
        nested = torch.nested.as_nested_tensor(placed, layout=torch.jagged)
        projection.to(device)(nested).values().sum().backward()

    return trace(step, device=device).peak


def _data_dependent() -> list[Any]:
    found: list[Any] = torch.nonzero(torch.randn(1000, device="cuda") > 0).tolist()
    return found


def _of(program: Callable[[], Any], **options: Any) -> Callable[[str], int]:
    return lambda device: trace(program, device="cuda", **options).peak


PROGRAMS: dict[str, tuple[Callable[[str], int], str]] = {
    **{
        f"{name}, {device}": (program, device)
        for device in ("cpu", "cuda")
        for name, program in (
            ("convolutions", _convolutions),
            ("attention", _attention),
            ("recurrent", _recurrent),
            ("everything imported", _everything_imported),
            ("jagged tensors", _jagged),
        )
    },
    "fully_shard": (_of(_fully_sharded, world_size=4), "cuda"),
    "DistributedDataParallel": (_of(_replicated, world_size=4), "cuda"),
    "tensor parallel": (_of(_tensor_parallel, world_size=4), "cuda"),
    "pipeline": (_of(_pipeline, world_size=4), "cuda"),
    "torch.compile": (_of(_compiled), "cuda"),
    "flex_attention": (_of(_flex_attention), "cuda"),
    "data-dependent": (_of(_data_dependent, values="real"), "cuda"),
}


def _run(interpreter: Path, names: Sequence[str]) -> dict[str, str]:
    command = [str(interpreter), "-W", "ignore", "-m", "benchmarks.versions", "--here", *names]
    # This checkout comes first: an interpreter may have none installed.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            read: dict[str, str] = json.loads(line.removeprefix(_MARK))
            return read
    return dict.fromkeys(names, f"the process ended with {done.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the peaks by program and version; return 1 if a program did not run."""
    parser = command("versions", __doc__)
    parser.add_argument("interpreters", nargs="*", type=Path, help="python of each installation")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--here", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.here is not None:  # the peaks of programs on this torch, or their errors
        found = {}
        for name in options.here:
            program, device = PROGRAMS[name]
            try:
                found[name] = f"{program(device):,}"
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:200]
        print(_MARK + json.dumps(found))
        return 0
    names = [name for name in PROGRAMS if options.only in name]
    columns = [_run(interpreter, names) for interpreter in options.interpreters]
    code = "import torch; print('torch', torch.__version__, 'cuda', torch.version.cuda)"
    headers = ["program"]
    for interpreter in options.interpreters:
        done = subprocess.run([str(interpreter), "-c", code], capture_output=True, text=True)
        headers.append(done.stdout.strip())
    rows = [[name, *(column[name] for column in columns)] for name in names]
    print(tabulate(rows, headers, disable_numparse=True, colalign=("left",)))
    return int(any(not row.replace(",", "").isdigit() for one in rows for row in one[1:]))


if __name__ == "__main__":
    sys.exit(main())
