"""What every run of pytest imports: options, ini keys, the header, and tests as it first met them.

Torch is not imported for it. A test may have replaced what everything is made of (``open``,
``__import__``), and not put it back, so nothing is imported where the plugin itself fails.

Every option's default is ``None``, so that "not given" can be told from "given" and the ini value
gets its turn.
"""

import re
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from pytest_torchmem.checks import DEFAULT_DEVICES, DEFAULT_GPU, MARKER, SELECTED_BY
from pytest_torchmem.figures import DEFAULT_TOLERANCE
from pytest_torchmem.printable import printable_lines
from pytest_torchmem.snapshots.location import snapshot_path, state_of

if TYPE_CHECKING:
    from pytest_torchmem.checks.request import Settings


_PACKAGE = __name__.partition(".")[0]
_VERSION = re.compile(r"^__version__ = ['\"]([^'\"]+)['\"]", re.MULTILINE)


class _Option(NamedTuple):
    """An option ``--torchmem-<name>``; with ``ini`` also the ini key ``torchmem_<name>``."""

    name: str
    help: str
    metavar: str = ""
    """What the value is called; a flag has none."""
    ini: bool = True
    ini_help: str = ""
    """Help for the ini key, where it is not the option's."""


_OPTIONS = (
    _Option("dry-run", "show what --torchmem-update would change; exit 1 if anything", ini=False),
    _Option("disable", "run test bodies without tracing; check nothing", ini=False),
    _Option(
        "strict",
        "also fail on shrinking beyond the tolerance, obsolete entries and unknown workspace",
    ),
    _Option("split-by-torch", "keep one snapshot entry per minor version of torch"),
    _Option("update-max", "largest growth that an update accepts, such as 15%", "TOLERANCE"),
    _Option("devices", "devices to trace on: cpu,cuda (default), cpu or cuda", "DEVICES"),
    _Option(
        "gpu",
        "GPU to model; traces must fit in its memory (default: a100-80gb, memory unlimited)",
        "NAME",
    ),
    _Option(
        "fake-cuda",
        "run the whole suite, without any marker, as if this GPU were there, such as h100",
        "GPU",
    ),
    _Option("allocator", "options of the CUDA allocator, as in PYTORCH_ALLOC_CONF", "OPTIONS"),
    _Option(
        "values",
        "values of tensors to compute beside a trace: auto (default: where the program decides by "
        "them), real (all), none",
        "WHICH",
    ),
    _Option("world-size", "processes that distributed steps run in, such as 8", "N"),
    _Option("ranks", "which of them to trace, such as 0,7 (default: 0)", "RANKS"),
    _Option(
        "tolerance",
        "growth that still passes: 1% (default), 64KiB, 2%+64KiB",
        "TOLERANCE",
        ini_help="growth that still passes, one rule a line: [path] [device] [phase]: 2%",
    ),
    _Option(
        "budget",
        "limit of the peak of every memory test, such as 16GiB; a marker's own is closer",
        "SIZE",
        ini_help="limits of every memory test, one a line: [path] [device] [phase]: 16 GiB",
    ),
    _Option(
        "measure",
        "run cuda checks for real too: auto (default: if there is a GPU), never, require, or "
        "stand-in: torch's own CUDA code, without a GPU",
        "WHEN",
    ),
    _Option(
        "measure-tolerance",
        "allowed difference between a trace and the real GPU (default: 5%)",
        "TOLERANCE",
    ),
    _Option("json", "write the results to this file as JSON", "PATH"),
    _Option("markdown", "write the results as Markdown, for a comment on a pull request", "PATH"),
    _Option("html", "write a page for each failing check, and an index, to this directory", "DIR"),
    _Option(
        "proposal",
        "if checks fail, write updated snapshot files to this directory "
        "(default in CI: torchmem-proposal)",
        "DIR",
    ),
    _Option("github", "GitHub annotations and job summary: auto (default), always, never", "WHEN"),
)
_UPDATES = {
    "": "write the snapshots of tests that pass: add, change and remove entries",
    "=new": "only add missing entries",
    "=changed": "only change existing entries",
    "=obsolete": "only remove entries whose test, name or module is gone",
    "=all": "the same as --torchmem-update",
}


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchmem", "memory tests of PyTorch models (pytest-torchmem)")
    parser.addini(
        f"verbosity_{SELECTED_BY}",
        "how much the summary of memory tests and their failures show, in the place of -v",
        default="auto",
    )
    # argparse would let "--torchmem-update" with an optional value swallow the path that follows
    # it, so each "=mode" is a flag of its own.
    for mode, text in _UPDATES.items():
        group.addoption(
            f"--torchmem-update{mode}",
            dest="torchmem_update",
            action="append_const",
            const=mode.lstrip("=") or "all",
            help=text,
        )
    for option in _OPTIONS:
        name, text = f"--torchmem-{option.name}", option.help.replace("%", "%%")
        if option.metavar:
            group.addoption(name, metavar=option.metavar, default=None, help=text)
        else:
            group.addoption(name, action="store_true", default=None, help=text)
        if option.ini:
            text = option.ini_help or option.help
            kind: Literal["string", "bool"] = "string" if option.metavar else "bool"
            parser.addini(_destination(option), text, type=kind, default=None)


def something_is_set(config: pytest.Config) -> bool:
    """Tell whether the command line or the ini file says anything about memory tests."""
    return config.getoption("torchmem_update") is not None or any(
        config.getoption(_destination(option)) is not None
        or (option.ini and config.getini(_destination(option)) is not None)
        for option in _OPTIONS
    )


def refuse_unknown_keys(config: pytest.Config) -> None:
    """Raise ``pytest.UsageError`` for an ini key that looks like one of ours and is not.

    pytest only warns of it, and the run would go on without what the key should have set. Also for
    one of ours that the command line sets to nothing.
    """
    for given in config.getoption("override_ini", None) or ():
        key, _, value = given.partition("=")
        if key.lower().startswith("torchmem") and not value.strip():
            raise pytest.UsageError(
                f"torchmem: -o {key}= has an empty value. Is a variable not set? Else leave it out"
            )
    # pytest 9 says not to ask for ``inicfg``, and has no other list of the keys of a file.
    keys = getattr(config, "_inicfg", None)
    for key in config.inicfg if keys is None else keys:
        if not key.lower().startswith("torchmem"):
            continue
        try:
            config.getini(key)
        except ValueError:
            from pytest_torchmem.errors import meant

            known = [_destination(option) for option in _OPTIONS if option.ini]
            guess = meant(key.lower().replace("-", "_"), known, cutoff=0.5)
            where = f" in {config.inipath}" if config.inipath is not None else ""
            raise pytest.UsageError(
                f"torchmem: {key!r}{where} is no setting of pytest-torchmem."
                f"{guess or ' There are: ' + ', '.join(known)}"
            ) from None


def _destination(option: _Option) -> str:
    return f"torchmem_{option.name.replace('-', '_')}"


def header(version: str, settings: "Settings | None") -> str:
    """Return the header: devices, GPU, torch, tolerance and what is done with snapshots.

    ``settings`` is ``None`` where nothing is set, so that nothing has to be read.
    """
    devices, gpu = tuple(DEFAULT_DEVICES.split(",")), DEFAULT_GPU
    tolerance, mode = DEFAULT_TOLERANCE, "comparing"
    if settings is not None:
        devices, gpu, mode = settings.devices, settings.gpu, settings.mode
        rules = settings.option_tolerance or settings.ini_tolerance
        tolerance = ", ".join(str(rule.tolerance) for rule in rules) or tolerance
    named = (f"cuda ({gpu})" if device == "cuda" else device for device in devices)
    found = torch_version()
    torch = f"torch {found}" if found else "torch is not installed"
    if settings is not None and settings.fake_cuda:
        mode = f"{mode}, every test sees a fake {settings.fake_cuda}"
    parts = (f"torchmem {version}", ", ".join(named), torch, f"tolerance {tolerance}", mode)
    return " | ".join(parts)


def torch_version() -> str | None:
    """Return the version of the torch that an import would find, ``None`` if there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return "of unknown version"
    match = _VERSION.search(text)
    return match.group(1) if match else "of unknown version"


_NODE_ID: pytest.StashKey[str] = pytest.StashKey()


class SeenFile:
    """A test file as it was when pytest began to collect it."""

    def __init__(self, collector: pytest.File) -> None:
        self.collector = collector
        self.members: list[pytest.Item | pytest.Collector] = []
        self.states = states_of(collector.path)


def states_of(module: Path) -> list[str]:
    """Return what differs once a test module or its snapshots have been changed."""
    return [state_of(module), state_of(snapshot_path(module))]


def written_early(config: pytest.Config, name: str) -> str:
    """Return an option or ini key as it is written, "" for none, before options are read."""
    namespaces = (config.option, config.known_args_namespace)
    given = next(filter(None, (getattr(known, name, None) for known in namespaces)), None)
    return str(given or config.getini(name) or "")


def note_id(item: pytest.Item) -> None:
    """Take note of a node id before plugins change it: xdist adds groups for ``loadgroup``."""
    item.stash[_NODE_ID] = item.nodeid


def node_id(item: pytest.Item) -> str:
    return item.stash.get(_NODE_ID, item.nodeid)


def checks_memory(node: pytest.Item | pytest.Collector) -> bool:
    """Tell whether a test has the fixture or the marker."""
    has_fixture = "torchmem" in getattr(node, "fixturenames", ())
    return has_fixture or node.get_closest_marker(MARKER) is not None


_FIXTURES = frozenset({"fs", "fs_class", "fs_module", "fs_session"})
_IS_DONE: pytest.StashKey[bool] = pytest.StashKey()


def import_before(item: pytest.Item) -> None:
    """Import all of this package before a fixture of pyfakefs puts other files in their place.

    What is imported while these stand would keep their functions, and is forgotten with them
    (pyfakefs/fake_filesystem_unittest.py, ``DynamicPatcher.cleanup``): there would be two of each
    class.
    """
    stash = item.session.stash
    if _IS_DONE in stash or _FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
        return
    stash[_IS_DONE] = True
    if any(map(checks_memory, item.session.items)):
        from importlib import import_module
        from pkgutil import walk_packages

        for module in walk_packages(import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
            import_module(module.name)


_REPORT = (
    "Has a test replaced something of Python and not put it back? Else please report the lines "
    "above to pytest-torchmem"
)

_OF_DEFECTS = (AssertionError, AttributeError, KeyError, NameError, TypeError, UnboundLocalError)


def hide_own_frames() -> None:
    """Leave the package's frames, unless they are to blame, out of what pytest shows of a failure.

    It asks the globals of a frame, too (``TracebackEntry.ishidden``, _pytest/_code/code.py).
    """
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == _PACKAGE:
            vars(module)["__tracebackhide__"] = _is_no_defect


def _is_no_defect(failure: pytest.ExceptionInfo[Any]) -> bool:
    """Return whether an error was not raised in this package by mistake.

    Of one without a traceback pytest wants a frame all the same.
    """
    if not getattr(failure.value, "pytrace", True):
        return False
    raised_by = failure.traceback[-1].frame.f_globals.get("__name__", "")
    return failure.type not in _OF_DEFECTS or raised_by.partition(".")[0] != _PACKAGE


def not_reported(error: Exception) -> str:
    """Return what is told of a test whose checks are not known, through no fault of its own."""
    return (
        f"{_lines(error)}\ntorchmem could not take the results of this test's checks: "
        f"{type(error).__name__}. {_REPORT}; -p no:torchmem runs the test without it"
    )


def not_concluded(error: Exception) -> str:
    """Return what is told at the end of a run whose results could not be written or shown."""
    return (
        f"{_lines(error)}\nerror: torchmem could not conclude this run: {type(error).__name__}. "
        f"Snapshots and reports may not be written, so the run fails. {_REPORT}"
    )


def let_fail(session: pytest.Session) -> None:
    """Let a run fail that would be a success otherwise."""
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _lines(error: Exception) -> str:
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception:  # the lines of a source cannot be read
        lines = type(error).__name__
    return printable_lines(lines)
