"""Traces that end anywhere and leave guards open, between real trainings that must not differ.

What may stay of a trace is seen by real training: its losses, what belongs to the thread, what
stands in torch's modules and the weights are the same, bit by bit, as before.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.hostile.project import Project, status_of
from pytest_torchmem import trace
from pytest_torchmem.errors import TorchmemError
from pytest_torchmem.torch_private.settings import all_settings, answers
from tests.tracing.test_nothing_left import places, thread_state

graph = torch.autograd.graph
GUARDS: dict[str, Callable[[str], Any]] = {
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "autocast off": lambda device: torch.autocast(device, enabled=False),
    "no_grad": lambda _: torch.no_grad(),
    "enable_grad": lambda _: torch.enable_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "inference_mode off": lambda _: torch.inference_mode(False),
    "saved tensors": lambda _: graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "no saved tensors": lambda _: graph.disable_saved_tensors_hooks("not here"),
    "offloaded": lambda _: graph.save_on_cpu(),
    "device": torch.device,
    "stream": lambda device: torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None),
    "kernels": lambda _: sdpa_kernel(SDPBackend.MATH),
    "functions": lambda _: BaseTorchFunctionMode(),
    "operators": lambda _: FlopCounterMode(display=False),
    "random numbers": lambda _: torch.random.fork_rng(devices=[]),
    "anomalies": lambda _: torch.autograd.set_detect_anomaly(True),
    "one thread": lambda _: torch.autograd.set_multithreading_enabled(False),
    "views": lambda _: _force_original_view_tracking(True),
    "warnings": lambda _: warnings.catch_warnings(),
    "deterministic": lambda _: torch.backends.cudnn.flags(deterministic=True),
}
LEFT = ("suspended", "suspended", "entered", "closed", "dropped", "with")
"""How a program leaves a guard: often in a generator that stays suspended."""
_BY_TRACE = {"__warningregistry__", "__annotations__", "_dynamo", "compiler"}
"""What Python and torch themselves write into a module that is used."""


class ProgramError(Exception):
    """An error of the program's own."""


class Net(nn.Module):
    """A network whose forward does something else ``within``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.within: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        """Return a number for each row."""
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number == 1 else block(x).relu()
            self.within()
        return self.drop(self.norm(x)).sum(-1)


def train(weights: dict[str, Tensor]) -> list[float]:
    """Return the losses of three real steps under autocast, from equal weights."""
    model = Net()
    model.load_state_dict(weights)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    torch.manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def state() -> list[Any]:
    """Return what belongs to the thread, and torch's settings but the seeds that wait for a GPU."""
    settings = [one for one in answers(all_settings()) if not isinstance(one, dict)]
    return [*thread_state(), *settings]


class Program:
    """A drawn program: what it enters and how it leaves that, what it runs and how it ends."""

    def __init__(self, chance: random.Random, model: Net, weights: dict[str, Tensor]) -> None:
        self.chance, self.model, self.weights = chance, model, weights
        self.losses = train(weights)
        self.device: Literal["cpu", "cuda"] = chance.choice(("cpu", "cuda"))
        self.suspended: list[Generator[None]] = []
        self._notes = os.memfd_create("notes")  # a trace gives back what a list of a module held
        self.note(self.device)

    def note(self, what: str) -> None:
        """Take note of what was drawn."""
        os.write(self._notes, f"{what}, ".encode())

    @property
    def notes(self) -> str:
        """What was drawn."""
        return os.pread(self._notes, 10_000, 0).decode()

    def __call__(self) -> None:
        """Train as a body does."""
        model = self.model.to(self.device)
        optimizer = self.chance.choice((torch.optim.SGD, torch.optim.Adam))(model.parameters())
        for _ in range(self.chance.randint(1, 2)):
            if self.chance.random() < 0.3:
                self._enter()
            loss = model(torch.randn(4, 8, device=self.device)).float().mean()
            if loss.requires_grad and not loss.is_inference():
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()

    def within(self) -> None:
        """Do what is drawn for a place of the forward."""
        drawn = self.chance.random()
        if drawn < 0.5:
            self._enter()
        elif drawn < 0.55:
            raise self.chance.choice((ProgramError, KeyboardInterrupt, SystemExit))
        elif drawn < 0.58:
            self._fork()
        elif drawn < 0.65 and self.suspended:
            self.note("closes one")
            self.suspended.pop(self.chance.randrange(len(self.suspended))).close()

    def _enter(self) -> None:
        names = [name for name in GUARDS if self.device == "cuda" or name != "stream"]
        name, how = self.chance.choice(names), self.chance.choice(LEFT)
        self.note(f"{name} {how}")
        guard = GUARDS[name](self.device)
        if how == "entered":
            guard.__enter__()
            return

        def steps() -> Generator[None]:
            with guard:
                yield
                yield

        generator = steps()
        next(generator)
        torch.ones(3, device=self.device) + 1
        if how == "suspended":
            self.suspended.append(generator)
        elif how != "dropped":
            generator.close()

    def _fork(self) -> None:
        child = os.fork()
        if not child:
            status = 3
            with contextlib.suppress(BaseException):
                status = 0 if train(self.weights) == self.losses else 4
            os._exit(status)
        self.note(f"CHILD {status}" if (status := status_of(child)) else "forks")

    def run(self) -> None:
        """Trace the program, or its model, on this thread or another, and perhaps interrupt it."""
        seconds = self.chance.random() * 0.1 if self.chance.random() < 0.2 else 0.0
        is_body, is_apart = self.chance.random() < 0.6, self.chance.random() < 0.2 and not seconds
        self.note(f"{'body' if is_body else 'module'} for {seconds:.3f} s, {is_apart=}")

        def traced() -> None:
            try:
                if is_body:
                    trace(self, device=self.device)
                else:
                    trace(self.model, torch.randn(4, 8), device=self.device)
            except (ProgramError, SystemExit, RuntimeError, TorchmemError) as error:
                self.note(f"{type(error).__name__}: {str(error)[:90]}")

        with contextlib.suppress(KeyboardInterrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                if is_apart:
                    thread = threading.Thread(target=traced)
                    thread.start()
                    thread.join()
                else:
                    traced()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)


def run(seed: int) -> list[str]:
    """Make the run of a seed in this process; return what was not as it must be."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    model = Net()
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    for _ in range(chance.randint(1, 3)):
        program = Program(chance, model, weights)
        model.within, numbers = program.within, torch.get_rng_state()
        versions = [one._version for one in model.state_dict(keep_vars=True).values()]
        before, stood = state(), places()
        program.run()
        found = ["training differs after the trace"] * (train(weights) != program.losses)
        chance.shuffle(program.suspended)
        for generator in program.suspended:
            generator.close() if chance.random() < 0.5 else next(generator, None)
        program.suspended.clear()
        gc.collect()
        found += ["training differs when all is closed"] * (train(weights) != program.losses)
        torch.set_rng_state(numbers)  # training has moved it
        pairs = zip(before, state(), strict=True)
        found += [f"{now}, not {was}"[:300] for was, now in pairs if was != now]
        for owner, now in places().items():
            was, gone = stood[owner], object()
            both = (was.keys() | now.keys()) - _BY_TRACE
            found += [
                f"{owner}.{n} stays" for n in both if was.get(n, gone) is not now.get(n, gone)
            ]
        for (name, one), version in zip(
            model.state_dict(keep_vars=True).items(), versions, strict=True
        ):
            if (one._version, one.grad) != (version, None) or not torch.equal(one, weights[name]):
                found.append(f"{name} is of version {one._version}, not {version}, or another")
        found += [program.notes] if found or "CHILD" in program.notes else []
        if found:
            return found
    return []


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def hostile_trace(project: Project, chance: random.Random) -> list[str]:
    """Trace a few programs one after the other, in a process of their own."""
    output, seed = project.path / "said", chance.randrange(10**9)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 70
        signal.signal(signal.SIGALRM, _interrupted)
        with open(output, "w") as file, open(os.devnull) as nowhere:
            os.dup2(nowhere.fileno(), 2)
            try:
                torch.set_num_threads(1)
                file.write("\n".join(run(seed)))
                status = 0
            except BaseException:
                file.write(traceback.format_exc())
        os._exit(status)
    status = status_of(child)
    said = output.read_text().splitlines() if output.exists() else []
    return [*said, *([f"status {status}"] if status else [])]
