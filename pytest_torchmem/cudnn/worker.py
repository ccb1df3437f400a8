"""The process that asks cuDNN: a question a line on its input, an answer a line on its output.

It never holds torch, and is started with ``library_path`` of ``questions.py`` in
``LD_LIBRARY_PATH``. cuDNN may end it (9.10.2 did, at a bfloat16 convolution of 4 channels):
whoever asks then starts another one.
"""

import json
import os
import sys
from typing import IO, Any

from pytest_torchmem.cudnn.backend import Backend
from pytest_torchmem.cudnn.execution_plans import Frontend, answer


def main(path: str, frontend: str = "") -> None:
    """Answer questions until the input ends.

    ``path`` is ``libcudnn.so.9``, and ``frontend`` the folder that has cudnn-frontend, if any does.
    """
    # cuDNN and what it loads may print; the answers have the pipe for themselves.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        backend = Backend(path)
        version = backend.version
    except (OSError, AttributeError) as error:
        _write(pipe, {"error": str(error)})
        return
    _write(pipe, {"version": list(version)})
    attention = Frontend(frontend)
    for line in sys.stdin:
        device, question = json.loads(line)
        if question["kind"] == "attention":
            found = attention.answer(device, question)
        else:
            found = answer(backend, device, question)
        plans = [[plan.workspace, plan.engine, plan.notes] for plan in found.plans]
        _write(pipe, {"plans": plans, "why": found.why})


def _write(pipe: IO[str], message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()
