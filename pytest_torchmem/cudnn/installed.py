"""Which cuDNN is there to be asked: a wheel beside other packages, or a folder that is named.

Nothing is imported or loaded to find out: the wheel of ``nvidia-cudnn-cu13`` is a folder of
``site-packages``, the same that a CUDA build of torch loads cuDNN from.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VARIABLE = "TORCHMEM_CUDNN"
"""A folder in place of the one in ``site-packages``: one that pip installed into (``--target``), or
one with cuDNN's libraries; ``off`` for none."""
OLDEST = (9, 8, 0)
"""The first version that answers without a device."""

Version = tuple[int, int, int]

#: What the CUDA build of each series of torch requires, by the wheel's metadata.
PINNED: dict[str, Version] = {
    "2.11": (9, 19, 0),
    "2.12": (9, 20, 0),
    "2.13": (9, 20, 0),
    "2.14": (9, 24, 0),
    "2.15": (9, 26, 0),
}
_LIBRARY = "libcudnn.so.9"
_BESIDE = ("cu13/lib", "cublas/lib", "cuda_nvrtc/lib", "cuda_runtime/lib")
_DEFINED = re.compile(r"^#define CUDNN_(MAJOR|MINOR|PATCHLEVEL)\s+(\d+)", re.MULTILINE)


class Installed(NamedTuple):
    """A cuDNN on this machine."""

    library: Path
    """``libcudnn.so.9``."""
    version: Version
    folders: tuple[Path, ...]
    """Where it and the libraries that it needs are."""
    frontend: Path | None = None
    """The folder that has cudnn-frontend, which attention is asked with."""

    def library_path(self, stand_in: Path) -> str:
        """Return ``LD_LIBRARY_PATH``; ``stand_in`` is the folder of the driver's stand-in."""
        return os.pathsep.join(map(str, (*self.folders, stand_in)))


def find_installed() -> Installed | str:
    """Return the cuDNN that would be asked, or why there is none to ask."""
    from pytest_torchmem.cudnn import driver

    named = os.environ.get(VARIABLE, "")
    if named.lower() == "off":
        return f"{VARIABLE} is off"
    if sys.platform != "linux" or not driver.is_supported():
        return "cuDNN can be asked on Linux alone, on x86-64 and aarch64"
    places = [Path(named)] if named else [Path(entry) for entry in sys.path if entry]
    for place in places:
        found = _in(place)
        if found is None:
            continue
        if found.version < OLDEST:
            return (
                f"cuDNN {version_text(found.version)} does not answer without a GPU: "
                f"{version_text(OLDEST)} and later do"
            )
        return found
    if named:
        return f"{VARIABLE}={named}: there is no {_LIBRARY} of a known version in it"
    return "cuDNN is not installed (docs/cudnn.md; pip install nvidia-cudnn-cu13 has it alone)"


def version_text(version: Version) -> str:
    """Return ``"9.20.0"``."""
    return ".".join(map(str, version))


def parse_version(text: str) -> Version:
    """Return the version that ``version_text`` wrote, (0, 0, 0) for another text."""
    parts = text.split(".")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return 0, 0, 0
    return int(parts[0]), int(parts[1]), int(parts[2])


def _in(place: Path) -> Installed | None:
    for folder in (place / "nvidia" / "cudnn" / "lib", place / "lib", place):
        library = folder / _LIBRARY
        if os.path.isfile(library):  # of ``Path``, it raises for folders that cannot be read
            version = _version_of(folder)
            if version is not None:
                return Installed(library, version, tuple(_folders(folder)), _frontend(place))
    return None


def _frontend(place: Path) -> Path | None:
    """Return the folder with ``nvidia-cudnn-frontend``, beside cuDNN or on ``sys.path``."""
    for folder in (place, *(Path(entry) for entry in sys.path if entry)):
        if any((folder / "cudnn").glob("_compiled_module*.so")):
            return folder
    return None


def _version_of(folder: Path) -> Version | None:
    """Read the version from the header beside the library, or from the name of the file.

    The wheel has the header there, and packages of distributions have a link to a full name.
    """
    for header in (folder.parent / "include", folder):
        try:
            text = (header / "cudnn_version.h").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = {name: int(number) for name, number in _DEFINED.findall(text)}
        if len(found) == 3:
            return found["MAJOR"], found["MINOR"], found["PATCHLEVEL"]
    name = os.path.basename(os.path.realpath(folder / _LIBRARY))
    version = parse_version(name.removeprefix("libcudnn.so."))
    return version if any(version) else None


def _folders(folder: Path) -> Iterator[Path]:
    """Yield the library's folder, and those of other wheels, beside it and of ``sys.path``."""
    yield folder
    roots = [folder.parent.parent, *(Path(entry) / "nvidia" for entry in sys.path if entry)]
    for name in _BESIDE:
        yield from dict.fromkeys(root / name for root in roots if os.path.isdir(root / name))
