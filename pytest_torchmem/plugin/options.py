"""The options and ini keys that pytest learns at every start; nothing is imported for it.

Every option's default is ``None``, so that "not given" can be told from "given" and the ini value
gets its turn.
"""

from __future__ import annotations

import pytest

UPDATE_MODES = ("new", "changed", "obsolete")
DEFAULT_DEVICES = "cpu,cuda"
DEFAULT_GPU = "a100-80gb"
DEFAULT_TOLERANCE = "1%"
MEASURE_MODES = ("auto", "never", "require")
DEFAULT_MEASURE_TOLERANCE = "5%"

_INI = (
    "strict",
    "split_by_torch",
    "update_max",
    "devices",
    "gpu",
    "allocator",
    "tolerance",
    "measure",
    "measure_tolerance",
    "json",
    "markdown",
    "proposal",
    "github",
)
_OPTIONS = ("update", "dry_run", "disable", *_INI)


def something_is_set(config: pytest.Config) -> bool:
    """Tell whether the command line or the ini file says anything about memory tests."""
    return any(config.getoption(f"torchmem_{name}") is not None for name in _OPTIONS) or any(
        config.getini(f"torchmem_{name}") is not None for name in _INI
    )


def add_options(parser: pytest.Parser) -> None:
    """Register every option and ini key."""
    group = parser.getgroup("torchmem", "memory tests of PyTorch models (pytest-torchmem)")
    # argparse would let "--torchmem-update" with an optional value swallow the path that follows
    # it, so each "=mode" is a flag of its own.
    group.addoption(
        "--torchmem-update",
        dest="torchmem_update",
        action="append_const",
        const="all",
        default=None,
        help="write the snapshots of the tests that run and pass: new, changed and obsolete ones",
    )
    for mode, what in (
        ("new", "only entries that do not exist yet"),
        ("changed", "only entries whose figures changed"),
        ("obsolete", "only remove entries whose test, name or module is gone"),
        ("all", "the same as --torchmem-update"),
    ):
        group.addoption(
            f"--torchmem-update={mode}",
            dest="torchmem_update",
            action="append_const",
            const=mode,
            default=None,
            help=what,
        )
    flags = {
        "dry-run": "print what --torchmem-update would change, write nothing, exit 1 if it would",
        "strict": "fail too on shrinking beyond the tolerance, obsolete entries and unknown bytes",
        "disable": "let the tests' bodies run untraced; nothing is checked",
        "split-by-torch": "keep an entry per minor version of torch",
    }
    for name, text in flags.items():
        group.addoption(f"--torchmem-{name}", action="store_true", default=None, help=text)
    values = {
        "update-max": ("TOLERANCE", "the most growth an update accepts, such as 15%%"),
        "devices": ("DEVICES", "the fake devices to trace on: cpu,cuda (default), cpu or cuda"),
        "gpu": (
            "NAME",
            "the GPU that fake cuda stands for, and on which what is traced has to fit "
            "(default: an a100-80gb without an end to its memory)",
        ),
        "allocator": ("OPTIONS", "options of cuda's allocator, as for PYTORCH_ALLOC_CONF"),
        "tolerance": ("TOLERANCE", "growth that still passes: 1%% (default), 64KiB, 2%%+64KiB"),
        "measure": (
            "WHEN",
            "run checks on cuda for real too: auto (default: where there is a GPU), never, require",
        ),
        "measure-tolerance": (
            "TOLERANCE",
            "by how much a trace may differ from what the GPU counts (default: 5%%)",
        ),
        "json": ("PATH", "write the results as JSON"),
        "markdown": ("PATH", "write the results as Markdown, for a pull request's comment"),
        "proposal": (
            "DIR",
            "when checks fail, write the updated snapshot files there (default in CI: "
            "torchmem-proposal)",
        ),
        "github": ("WHEN", "annotations and job summary for GitHub: auto (default), always, never"),
    }
    for name, (metavar, text) in values.items():
        group.addoption(f"--torchmem-{name}", metavar=metavar, default=None, help=text)
    ini = {
        "devices": "fake devices to trace on, such as: cpu,cuda",
        "gpu": "the GPU that fake cuda stands for, and on which what is traced has to fit",
        "allocator": "options of cuda's caching allocator, written as for PYTORCH_ALLOC_CONF",
        "tolerance": "growth that still passes, one rule a line: [path] [device] [phase]: 2%",
        "measure": "run checks on cuda for real too: auto, never or require",
        "measure_tolerance": "by how much a trace may differ from what the GPU counts",
        "update_max": "the most growth that --torchmem-update accepts",
        "json": "where to write the results as JSON",
        "markdown": "where to write the results as Markdown",
        "proposal": "where to write updated snapshot files when checks fail",
        "github": "annotations and job summary for GitHub: auto, always or never",
    }
    for name, text in ini.items():
        parser.addini(f"torchmem_{name}", text, type="string", default=None)
    parser.addini("torchmem_strict", "as --torchmem-strict", type="bool", default=None)
    parser.addini(
        "torchmem_split_by_torch", "as --torchmem-split-by-torch", type="bool", default=None
    )
