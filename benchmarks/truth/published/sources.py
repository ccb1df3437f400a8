"""Where published recordings are, and how they come here."""

import hashlib
import json
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

_LIST = Path(__file__).with_name("sources.json")


class SourceError(ValueError):
    """A recording that is not what its source says."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file in a public repository."""

    repository: str
    """On GitHub, with its owner."""
    commit: str
    path: str
    sha256: str
    torch: str
    """The version that the repository's lock file or requirements name, "" where nothing does."""
    licence: str
    """What the repository's licence file says, "" where it has none."""

    @property
    def name(self) -> str:
        """Repository and path."""
        return f"{self.repository} {self.path}"

    @property
    def url(self) -> str:
        """Where the file can be had."""
        at = "https://raw.githubusercontent.com"
        return f"{at}/{self.repository}/{self.commit}/{quote(self.path)}"

    @property
    def is_snapshot(self) -> bool:
        """Whether it is a memory snapshot; else it is a profiler's trace."""
        return ".json" not in self.path

    def file(self, directory: Path) -> Path:
        """Return where the file is kept."""
        return directory / self.repository / self.commit / self.path

    def download(self, directory: Path) -> Path:
        """Bring the file to a directory, if it is not there.

        Raises ``OSError`` where it cannot be had, ``SourceError`` where it is another file.
        """
        path = self.file(directory)
        if not path.exists():
            with urllib.request.urlopen(self.url, timeout=60) as answer:
                data = answer.read()
            self._check(data)
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_bytes(data)
            os.replace(part, path)
        return path

    def check(self, directory: Path) -> Path:
        """Return the file; raises ``SourceError`` where it is missing or another one."""
        path = self.file(directory)
        try:
            self._check(path.read_bytes())
        except FileNotFoundError:
            raise SourceError(f"{path} is not there; it comes from {self.url}") from None
        return path

    def _check(self, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise SourceError(f"what is at {self.url} is another file than the one compared")


def sources() -> list[Source]:
    """Return all of them, in order of name."""
    found = [Source(**entry) for entry in json.loads(_LIST.read_text())]
    return sorted(found, key=lambda source: (source.name.lower(), source.commit))
