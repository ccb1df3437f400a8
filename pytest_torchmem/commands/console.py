"""A command on a terminal: what its line names, how far it has come, and what it ends with.

A line names functions, profiles that were saved, and models by name, which are made from their
configuration alone: no weights are read, and none take memory.
"""

import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from pytest_torchmem.errors import TorchmemError, UsageError
from pytest_torchmem.printable import printable, printable_lines

if TYPE_CHECKING:
    from pytest_torchmem.profile.profile import MemoryProfile


USAGE = 2
_INTERRUPTED, _PIPE = 130, 141
"""What a shell reports of a program that SIGINT, or SIGPIPE, has ended."""
_OWN = str(Path(__file__).parent.parent)
_PATH = "(pytest's setting pythonpath is not read here: name its directories in PYTHONPATH)"


def prepare_streams() -> None:
    """Let everything be printed, and to nowhere where a stream was closed (``>&-``).

    A name may have letters that a terminal has not.
    """
    if sys.stdout is None:  # Python's answer to a closed descriptor
        sys.stdout = _nowhere()
    if sys.stderr is None:
        sys.stderr = _nowhere()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def status_of(run: Callable[[], int]) -> int:
    """Return the exit status of a command; report the error that ended it."""
    output = sys.stdout
    try:
        status = run()
        output.flush()
    except BrokenPipeError:  # whoever reads has read enough, as ``head`` does
        _abandon(output)
        return _PIPE
    except KeyboardInterrupt:
        _tell("torchmem: interrupted")
        return _INTERRUPTED
    except (TorchmemError, OSError) as error:
        _abandon(output)  # it may be what cannot be written
        told = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            told = f"{error.filename}: {error.strerror}"
        _tell(f"torchmem: error: {told}")
        return USAGE
    except (Exception, SystemExit) as error:
        if output.closed:
            _tell(
                "torchmem: error: the program has closed the standard output, so nothing is shown"
            )
            return USAGE
        if not (lines := _raised_by_program(error)):
            raise
        _tell(f"torchmem: error: the program raised\n{''.join(lines).rstrip()}")
        return USAGE
    return status


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _abandon(stream: TextIO) -> None:
    """Let what was printed and cannot be written go nowhere, of which Python would tell at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):  # no stream of the process, or a closed one
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _tell(text: str) -> None:
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _abandon(sys.stderr)


def _raised_by_program(error: BaseException) -> list[str]:
    """Return the traceback of what a function of the user's raised, without our part of it; nothing
    where something here failed. An operator that refuses its arguments is refused by a ``raise``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return []
    last = frames[-1]
    if last.filename.startswith(_OWN) and not (last.line or "").startswith("raise "):
        return []
    theirs = [one for one in frames if not one.filename.startswith((_OWN, "<frozen importlib"))]
    told = [*traceback.format_list(theirs), *traceback.format_exception_only(error)]
    return [*told, _PATH] if isinstance(error, ModuleNotFoundError) else told


_PATIENCE = 1.0
"""Seconds of which nobody needs to be told."""


def elapsed(what: str) -> AbstractContextManager[None]:
    """Show ``what`` is being done, and for how long."""
    begun = time.monotonic()
    return progress(lambda: f"{what}: {time.monotonic() - begun:.0f} s")


@contextmanager
def progress(told: Callable[[], str]) -> Iterator[None]:
    """Show what is told of the body while it runs, on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    stream, over, shown = sys.stderr, Event(), ""

    def show() -> None:
        nonlocal shown
        while not over.wait(_PATIENCE):
            before, shown = shown, told()
            padding = " " * (len(before) - len(shown))
            print(f"\r{shown}{padding}", end="", file=stream, flush=True)

    thread = Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if shown:
            print(f"\r{' ' * len(shown)}", end="\r", file=stream, flush=True)


def load_function(written: str, batch: int = 1, sequence: int = 512) -> Callable[[], object]:
    """Return the function that ``package.module:function`` or ``file.py:function`` names, or one
    that makes the model which ``library:name`` does.

    Modules are looked for where the command was started, too. Raises ``UsageError`` where there is
    none, or where it needs arguments; what the module raises is its own.
    """
    if (named := named_model(written, batch, sequence)) is not None:
        return named
    place, separator, name = written.rpartition(":")
    if not separator or not place or not name:
        raise UsageError(f"{written!r}: write package.module:function or file.py:function")
    sys.path.insert(0, os.getcwd())
    found: Any = _of_file(Path(place)) if place.endswith(".py") else _of_name(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{place} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{written} is no function: {type(found).__name__}")
    if needed := _needed(found):
        raise UsageError(
            f"{written} needs arguments ({', '.join(needed)}): name a function without any, which "
            "runs a step, or returns a module and its inputs"
        )
    return found  # type: ignore[no-any-return]


def _needed(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, which does not say
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty and one.kind not in several
    ]


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} does not exist, or is no file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _of_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the module itself asks for
        raise UsageError(f"there is no module {name!r} here, nor installed") from None


_GZIP = b"\x1f\x8b"


def is_profile(path: Path) -> bool:
    """Return whether a file is what ``MemoryProfile.load`` reads, rather than a snapshot."""
    from pytest_torchmem.profile.formats.saved import PICKLE
    from pytest_torchmem.profile.profile import SAVED

    if not path.is_file():  # reading a pipe would wait
        return False
    content = path.read_bytes()
    if content.startswith((_GZIP, PICKLE)):
        return True  # snapshots are neither compressed nor pickles
    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(plain, dict) and plain.get("kind") == SAVED


def print_profile(profile: "MemoryProfile", rows: int = 10) -> None:
    print(profile.table(rows))
    print(f"\nin the course of the step: {profile.sparkline()}")
    for warning in profile.warnings:
        print(f"note: {printable(warning)}")


Model = tuple[Any, Any] | tuple[Any, Any, dict[str, Any]]
"""A model on meta and its inputs, the last of them keyword arguments."""


def named_model(written: str, batch: int, sequence: int) -> Callable[[], Model] | None:
    """Return what makes the model that ``hf:NAME``, ``timm:NAME`` or ``torchvision:NAME`` names,
    None where ``written`` is none of these.

    ``batch`` is the number of samples, ``sequence`` of tokens each; pictures are as large as the
    model's configuration says. Raises ``UsageError`` if the library is not installed.
    """
    library, _, name = written.partition(":")
    if library not in _LIBRARIES:
        return None
    package, build = _LIBRARIES[library]
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UsageError(f"{written}: {error}. Install it: pip install {package}") from None
    return partial(build, module, name, batch, sequence)


def _of_transformers(transformers: ModuleType, name: str, batch: int, sequence: int) -> Model:
    """Return a model of the hub or a local folder, in the type of its checkpoint."""
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:  # what it says of a name that it does not find
        raise UsageError(f"hf:{name}: {str(error).partition('. ')[0]}") from None
    kind = getattr(transformers, (config.architectures or ("",))[0], None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(config, "dtype", None) or torch.float32)
    try:  # what is float32 whatever the type of the checkpoint, such as frequencies, stays that
        with torch.device("meta"):
            made = (kind or transformers.AutoModel.from_config)(config)
    finally:
        torch.set_default_dtype(before)
    takes = inspect.signature(made.forward).parameters
    if made.main_input_name == "pixel_values":
        size = config.image_size
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        picture = torch.zeros(batch, config.num_channels, height, width, dtype=made.dtype)
        return made, picture
    if made.main_input_name != "input_ids":
        raise UsageError(
            f"hf:{name} takes {made.main_input_name}: write a function that returns the model and "
            "its inputs, and name that"
        )
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    known = {"input_ids": tokens}
    if "decoder_input_ids" in takes and config.is_encoder_decoder:
        known["decoder_input_ids"] = tokens
    if "labels" in takes and made.get_output_embeddings() is not None:
        known["labels"] = tokens
    return (made, known)


def _of_timm(timm: ModuleType, name: str, batch: int, sequence: int) -> Model:
    import torch

    with torch.device("meta"):
        made = timm.create_model(name)
    return made, torch.zeros(batch, *made.default_cfg["input_size"])


def _of_torchvision(models: ModuleType, name: str, batch: int, sequence: int) -> Model:
    import torch

    transforms = next(iter(models.get_model_weights(name))).transforms()
    if not hasattr(transforms, "crop_size"):
        raise UsageError(
            f"torchvision:{name} is no classifier of pictures: write a function that returns the "
            "model and its inputs, and name that"
        )
    size = transforms.crop_size[0]
    with torch.device("meta"):
        made = models.get_model(name, weights=None)
    return made, torch.zeros(batch, 3, size, size)


_LIBRARIES: dict[str, tuple[str, Callable[..., Model]]] = {
    "hf": ("transformers", _of_transformers),
    "timm": ("timm", _of_timm),
    "torchvision": ("torchvision.models", _of_torchvision),
}
