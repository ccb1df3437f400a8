"""What options, ini keys and the environment ask for, read once into one frozen value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_torchmem.errors import UsageError
from pytest_torchmem.plugin.options import (
    DEFAULT_GPU,
    DEFAULT_MEASURE_TOLERANCE,
    MEASURE_MODES,
    UPDATE_MODES,
)
from pytest_torchmem.snapshots.tolerance import (
    BUILT_IN,
    DEVICES,
    Level,
    Tolerance,
    for_path,
    parse_rule_lines,
    parse_rules,
    parse_tolerance,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line, the ini file and the environment ask for."""

    devices: tuple[str, ...]
    gpu: str
    """The GPU's name in the catalogue."""
    gpu_named: bool
    """Somebody named the GPU: what is traced has to fit on it."""
    allocator: str
    """Options of the caching allocator, as for ``PYTORCH_ALLOC_CONF``."""
    narrowed: bool
    """Devices or GPU were named on the command line: the others' entries are not obsolete."""
    measure: str
    """When checks on cuda are run for real too: one of ``MEASURE_MODES``."""
    measure_tolerance: Tolerance
    """By how much a trace may differ from what a real GPU counts."""
    option_tolerance: Level
    ini_tolerance: Level
    update: frozenset[str]
    update_max: Tolerance | None
    dry_run: bool
    strict: bool
    disabled: bool
    split_by_torch: bool
    in_ci: bool
    on_github: bool
    json_path: Path | None
    markdown_path: Path | None
    proposal_path: Path | None

    @property
    def writes(self) -> bool:
        """Whether this run may write snapshot files."""
        return bool(self.update) and not self.dry_run

    @property
    def writes_reports(self) -> bool:
        """Whether files are asked for that say what the run came to."""
        return self.json_path is not None or self.markdown_path is not None

    def tolerances(self, path: str) -> list[Level]:
        """Return what holds for a test file where test and entry say nothing, closest first."""
        special, general = for_path(self.ini_tolerance, path)
        return [self.option_tolerance, special, general, BUILT_IN]

    @property
    def mode(self) -> str:
        """What this run does with snapshots, for the header."""
        if self.disabled:
            return "disabled"
        if not self.update:
            return "comparing (strict)" if self.strict else "comparing"
        what = "all" if len(self.update) == len(UPDATE_MODES) else ", ".join(sorted(self.update))
        return f"{'dry run of an update' if self.dry_run else 'updating'} ({what})"


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of a run; raises ``pytest.UsageError`` for what cannot be understood."""
    try:
        return _read(config)
    except UsageError as error:
        raise pytest.UsageError(f"torchmem: {error}") from None


def _read(config: pytest.Config) -> Settings:
    dry_run = bool(config.getoption("torchmem_dry_run"))
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
    update = _update_modes(config, dry_run)
    if in_ci and update and not dry_run:
        raise UsageError(
            "the environment variable CI is set, and snapshots are never written there. "
            "Update them on your machine and commit the files (or unset CI)"
        )
    update_max = _value(config, "update_max")
    proposal = _path(config, "proposal")
    if proposal is None and in_ci:
        proposal = config.rootpath / "torchmem-proposal"
    option_tolerance = config.getoption("torchmem_tolerance")
    ini_tolerance = config.getini("torchmem_tolerance")
    return Settings(
        devices=parse_devices(_value(config, "devices") or ",".join(DEVICES), "torchmem_devices"),
        gpu=_gpu(_value(config, "gpu") or DEFAULT_GPU),
        gpu_named=_value(config, "gpu") is not None,
        allocator=_allocator(_value(config, "allocator") or ""),
        narrowed=any(config.getoption(f"torchmem_{name}") for name in ("devices", "gpu")),
        measure=parse_measure(_value(config, "measure") or MEASURE_MODES[0], "torchmem_measure"),
        measure_tolerance=parse_tolerance(
            _value(config, "measure_tolerance") or DEFAULT_MEASURE_TOLERANCE
        ),
        option_tolerance=parse_rules(option_tolerance, "--torchmem-tolerance"),
        ini_tolerance=parse_rule_lines(ini_tolerance or "", "ini torchmem_tolerance"),
        update=update,
        update_max=parse_tolerance(update_max) if update_max is not None else None,
        dry_run=dry_run,
        strict=_flag(config, "strict"),
        disabled=bool(config.getoption("torchmem_disable")),
        split_by_torch=_flag(config, "split_by_torch"),
        in_ci=in_ci,
        on_github=_on_github(_value(config, "github") or "auto"),
        json_path=_path(config, "json"),
        markdown_path=_path(config, "markdown"),
        proposal_path=proposal,
    )


def parse_devices(value: object, source: str) -> tuple[str, ...]:
    """Return the devices in ``value``, a text such as ``"cpu,cuda"`` or a sequence of names."""
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise UsageError(f"{source}: {value!r} names no device: write cpu, cuda or cpu,cuda")
    for name in names:
        if name not in DEVICES:
            raise UsageError(f"{source}: {name!r} is not a device: write cpu, cuda or cpu,cuda")
    return tuple(device for device in DEVICES if device in names)


def parse_measure(value: object, source: str) -> str:
    """Return when to measure on a real GPU, one of ``MEASURE_MODES``."""
    if not isinstance(value, str) or value not in MEASURE_MODES:
        raise UsageError(f"{source}: {value!r}: write {', '.join(MEASURE_MODES[:-1])} or require")
    return value


def _update_modes(config: pytest.Config, dry_run: bool) -> frozenset[str]:
    asked = config.getoption("torchmem_update") or (["all"] if dry_run else [])
    return frozenset(UPDATE_MODES if "all" in asked else asked)


def _value(config: pytest.Config, name: str) -> str | None:
    """Return what an option or, where it is not given, its ini key says."""
    value: str | None = config.getoption(f"torchmem_{name}")
    if value is None:
        value = config.getini(f"torchmem_{name}")
    return value if value != "" else None


def _flag(config: pytest.Config, name: str) -> bool:
    return bool(config.getoption(f"torchmem_{name}") or config.getini(f"torchmem_{name}"))


def _path(config: pytest.Config, name: str) -> Path | None:
    """Return a path: relative to where pytest was started, or, from the ini file, to the root."""
    given = config.getoption(f"torchmem_{name}")
    if given:
        return Path(config.invocation_params.dir, given)
    written = config.getini(f"torchmem_{name}")
    return Path(config.rootpath, written) if written else None


def _gpu(name: str) -> str:
    if name == DEFAULT_GPU:
        return name
    from pytest_torchmem.targets.gpus import find_gpu

    return find_gpu(name).name


def _allocator(options: str) -> str:
    if options:
        from pytest_torchmem.allocator import parse_options

        parse_options(options)
    return options


def _on_github(when: str) -> bool:
    if when not in ("auto", "always", "never"):
        raise UsageError(f"torchmem_github: {when!r}: write auto, always or never")
    return when == "always" or (when == "auto" and os.environ.get("GITHUB_ACTIONS") == "true")
