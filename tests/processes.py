"""Programs in processes of their own, this one as a process of a group, and threads beside.

The former are forked from one that has imported torch: this takes longer than most of them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

_SERVER = """
import json, os, sys
import torch
while line := sys.stdin.readline():
    job = json.loads(line)
    if not (process := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
if line:
    files = os.devnull, job["output"], job["errors"]
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR), number)
    os.chdir(job["directory"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv[1:] = job["arguments"]
    exec(compile(job["program"], "<string>", "exec"))
"""


@cache
def _server() -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-W", "ignore", "-c", _SERVER], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)


def run_program(program, *arguments, seconds=300) -> subprocess.CompletedProcess[str]:
    """Run a program that has to succeed, as ``python -W ignore -c`` does."""
    server = _server()
    sent, answers = server.stdin, server.stdout
    assert sent is not None
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        for file in (output, errors):
            file.touch()
        job = {
            "program": program,
            "arguments": arguments,
            "directory": os.getcwd(),
            "environment": dict(os.environ),
            "output": str(output),
            "errors": str(errors),
        }
        print(json.dumps(job), file=sent, flush=True)
        if not wait([answers.fileno()], seconds):
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise TimeoutError(f"no end after {seconds} s: {errors.read_text()}")
        status = int(answers.readline())
        assert status == 0, f"status {status}: {errors.read_text()}"
        return subprocess.CompletedProcess(program, status, output.read_text(), errors.read_text())


@contextmanager
def group_of_one(backend: str = "gloo") -> Iterator[None]:
    """Be the one process of a group for a while."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def beside(work: Callable[[], object], end: Callable[[], object] = int) -> Iterator[None]:
    """Let another thread work meanwhile, which is told to end, and waited for."""
    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join()


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what another thread comes to, which is waited for."""
    found: list[Any] = []
    thread = Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found.pop()


def waits_for(first: AbstractContextManager[object], other: AbstractContextManager[object]) -> None:
    """Expect that another thread enters ``other`` once ``first`` has been left, and not before."""
    entered = Event()

    def enter() -> None:
        with other:
            entered.set()

    with first:
        thread = Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(60)
    thread.join()
