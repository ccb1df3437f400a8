"""The manifest: which programs there are, where they come from and how each is run."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

HERE = Path(__file__).parent
MANIFEST = HERE / "manifest.toml"


class ManifestError(ValueError):
    """The manifest says something that cannot be right."""


@dataclass(frozen=True)
class Source:
    """A public repository at a commit, or a package of the environment."""

    name: str
    licence: str
    repository: str = ""
    commit: str = ""
    package: str = ""

    @property
    def is_package(self) -> bool:
        """Whether pip brought it; its version and checksum stand in ``requirements.txt``."""
        return bool(self.package)


@dataclass(frozen=True)
class Entry:
    """One program: its files, and the script with arguments or the driver that calls it."""

    name: str
    source: Source
    group: str
    paths: tuple[str, ...] = ()
    sha256: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()
    driver: str = ""
    parameters: tuple[str, ...] = ()
    suite: tuple[str, ...] = ()
    """Arguments of pytest, if the program is a test suite: its tests get the marker."""
    folder: str = "."
    data: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    steps: int | None = None
    """After how many optimizer steps the program is ended; ``None``: it ends by itself."""
    needs_cuda: bool = False
    """Whether it calls ``.cuda()`` without asking; the real run then makes these the identity."""
    compare: bool = True
    """Whether two runs with one seed execute the same lines, so that they can be compared."""


def read_manifest(path: Path = MANIFEST) -> list[Entry]:
    """Return the programs of the manifest, each checked."""
    document = tomli.loads(path.read_text(encoding="utf-8"))
    sources = {name: _source(name, row) for name, row in document["sources"].items()}
    entries = [_entry(row, sources) for row in document["program"]]
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ManifestError(f"these programs stand twice in the manifest: {', '.join(twice)}")
    unused = sorted(set(sources) - {entry.source.name for entry in entries})
    if unused:
        raise ManifestError(f"these sources have no program: {', '.join(unused)}")
    return entries


def _source(name: str, row: dict[str, Any]) -> Source:
    source = Source(name=name, **row)
    if not source.licence:
        raise ManifestError(f"source {name}: its licence is missing")
    if source.is_package == bool(source.repository):
        raise ManifestError(f"source {name}: say either a repository or a package")
    if source.repository and not re.fullmatch(r"[0-9a-f]{40}", source.commit):
        raise ManifestError(f"source {name}: its commit is not 40 hexadecimal digits")
    return source


def _entry(row: dict[str, Any], sources: dict[str, Source]) -> Entry:
    name = row.get("name", "?")
    if row.get("source") not in sources:
        raise ManifestError(f"program {name}: there is no source {row.get('source')!r}")
    row = {**row, "source": sources[row["source"]]}
    script, *arguments = shlex.split(row.pop("run", "")) or [""]
    for key in ("paths", "parameters", "data", "packages", "suite"):
        row[key] = tuple(row.get(key, ()))
    entry = Entry(**row, script=script, arguments=tuple(arguments))
    if [bool(entry.script), bool(entry.driver), bool(entry.suite)].count(True) != 1:
        raise ManifestError(f"program {name}: say either run, driver or suite")
    if not entry.source.is_package and not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
        raise ManifestError(f"program {name}: its sha256 is not 64 hexadecimal digits")
    return entry
