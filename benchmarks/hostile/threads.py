"""Threads that compute beside traces: their results, bit by bit, and the figures of the traces."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.hostile.project import Project, status_of
from pytest_torchmem import trace

_TRACES = (3, 12)
_ROUNDS = 4
"""A process's first trace takes longer than all others of a round."""


def _inputs(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _trained(seed: int) -> Any:
    weight, given = _inputs(seed, 6, 6), _inputs(seed + 1, 4, 6)
    weight = nn.Parameter(weight.detach())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    for _ in range(2):
        functional.gelu(given @ weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight.detach()


def _attended(seed: int) -> Any:
    query = _inputs(seed, 1, 2, 5, 4)
    functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    return query.grad


def _recurrent(seed: int) -> Any:
    given, hidden = _inputs(seed, 5, 2, 3), _inputs(seed + 1, 1, 2, 4)
    weights = [_inputs(seed + 2 + number, 12, 3 + number) for number in range(2)]
    output, _ = torch._VF.gru(
        given, hidden, [*weights, *(_inputs(seed + 4, 12),) * 2], True, 1, 0.0, True, False, False
    )
    output.sum().backward()
    return output.detach()


def _read(seed: int) -> Any:
    given = _inputs(seed, 3, 4).detach()
    made = torch.tensor([float(given[0, 0]), given.sum().item(), *given[1].tolist()])
    return [repr(given), given.numpy().tobytes(), made, torch.device("cpu"), str(made.device)]


def _copied(seed: int) -> Any:
    given, file = _inputs(seed, 3, 4), io.BytesIO()
    torch.save({"it": given.detach()}, file)
    file.seek(0)
    read = torch.load(file)["it"]
    return [copy.deepcopy(given).detach(), pickle.loads(pickle.dumps(given.detach())), read]


def _asked(seed: int) -> Any:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).eval()
    for number, parameter in enumerate(module.parameters()):
        parameter.data = _inputs(seed + number, *parameter.shape).detach()
    del module[1].weight
    module[1].register_parameter("weight", None)
    on_gpu = torch.cuda.is_available(), torch.cuda.device_count(), torch.get_default_dtype()
    return [module(_inputs(seed, 2, 3)).detach(), on_gpu, torch.is_grad_enabled()]


def _drawn(seed: int) -> Any:
    own, order = random.Random(seed), torch.Generator().manual_seed(seed)
    return [own.random(), torch.randperm(7, generator=order), torch.randn(3, generator=order)]


_NUMBERS = set[Any]()


def _drawn_anew(seed: int) -> Any:
    """Tell whether the process's own generators give numbers that they never gave before."""
    numbers = [tuple(torch.rand(3).tolist()), random.random()]
    new = [number not in _NUMBERS for number in numbers]
    _NUMBERS.update(numbers)
    return new


WORK: tuple[Callable[[int], Any], ...] = (
    _trained, _attended, _recurrent, _read, _copied, _asked, _drawn, _drawn_anew, _drawn_anew,
)  # fmt: skip
"""What threads beside a trace do."""


def _step(device: str, size: int) -> None:
    weight = torch.ones(size, size, device=device, requires_grad=True)
    output = functional.dropout(weight @ weight, 0.5).relu()
    (output * (2.0 if output.sum().item() > 0 else 1.0)).sum().backward()


def _module_step(device: str, size: int) -> None:
    layers = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size), nn.GELU()).to(device)
    optimizer = torch.optim.AdamW(layers.parameters())
    layers(torch.rand(3, size, device=device)).sum().backward()
    optimizer.step()


def _threads_step(device: str, size: int) -> None:
    made = [threading.Thread(target=_step, args=(device, size)) for _ in range(2)]
    for one in made:  # one after the other: the order decides the peak
        one.start()
        one.join()


def _failing_step(device: str, size: int) -> None:
    _step(device, size)
    raise ZeroDivisionError


TRACED = (_step, _module_step, _threads_step, _failing_step)


def _plain(value: Any) -> Any:
    """Return what two equal results have equal."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes(), tuple(value.shape), str(value.dtype)
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _figures(case: tuple[Callable[..., None], Any, int]) -> Any:
    step, device, size = case
    try:
        return trace(step, device, size, device=device).figures()
    except ZeroDivisionError as error:
        return repr(error)


class _Worker(threading.Thread):
    def __init__(self, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        chance = random.Random(seed)
        self._work = [(chance.choice(WORK), chance.randrange(1000)) for _ in range(3)]
        self._stop_now, self.began, self.found = stop, threading.Event(), list[str]()

    def run(self) -> None:
        try:
            expected = [_plain(work(seed)) for work, seed in self._work]
            self.began.set()
            while not self._stop_now.is_set() and not self.found:
                for (work, seed), value in zip(self._work, expected, strict=True):
                    if _plain(work(seed)) != value:
                        self.found.append(f"{work.__name__}({seed}) has another result")
        except Exception as error:
            self.found.append(f"{type(error).__name__}: {error}")
        finally:
            self.began.set()


def _beside(seed: int) -> list[str]:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    cases = [
        (chance.choice(TRACED), chance.choice(("cpu", "cuda")), chance.randint(2, 9))
        for _ in range(chance.randint(*_TRACES))
    ]
    alone, stop = list(map(_figures, cases)), threading.Event()
    workers = [_Worker(chance.randrange(10**9), stop) for _ in range(chance.randint(1, 3))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.began.wait()
    beside = list(map(_figures, cases))
    stop.set()
    for worker in workers:
        worker.join()
    found = [line for worker in workers for line in worker.found]
    for case, before, now in zip(cases, alone, beside, strict=True):
        if before != now:
            found.append(f"{case[0].__name__}{case[1:]}: {before} alone, {now} beside threads")
    return found


def hostile_threads(project: Project, chance: random.Random) -> list[str]:
    """Trace beside threads that compute: neither they nor the figures of the traces notice."""
    file, seed = project.path / "found.json", chance.randrange(10**9)
    pid = os.fork()
    if not pid:
        status = 70
        try:
            found = [line for number in range(_ROUNDS) for line in _beside(seed + number)]
            file.write_text(json.dumps(found))
            status = 0
        finally:
            os._exit(status)
    try:
        status = status_of(pid)
    except TimeoutError as error:
        return [str(error)]
    return json.loads(file.read_text()) if status == 0 else [f"status {status}"]
