"""Checks on every supported version, each in an environment of its own; ``nox --list`` names them.

On Linux, set ``UV_TORCH_BACKEND=cpu``: the torch of the index is the CUDA build.
"""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["package", "resolutions"]

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
EXTRAS = ("cudnn", "cudnn-attention", "examples", "test", "plugins")
MISSING = {("3.10", "2.15.0")}
"""Wheels that torch does not publish: 2.15 begins with Python 3.11."""


@nox.session
@nox.parametrize(
    ("python", "torch"),
    [(python, torch) for python in PYTHONS for torch in TORCHES if (python, torch) not in MISSING],
)
@nox.parametrize("pytest", ("8", "9"))
def tests(session: nox.Session, torch: str, pytest: str) -> None:
    """Run the examples and the tests with one Python, torch and pytest."""
    session.install(f"torch=={torch}", f"pytest=={pytest}.*", "-e", ".[test]")
    session.run("pytest", "examples")
    session.run("pytest", *(session.posargs or ("-n", "auto", "--dist", "worksteal")))


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """Run the tests with the oldest version of everything that the plugin requires."""
    session.install("--resolution", "lowest-direct", "-e", ".")
    session.install("-e", ".[test]")  # keeps what is there
    session.run("pytest", "examples")
    session.run("pytest", *(session.posargs or ("-n", "auto", "--dist", "worksteal")))


@nox.session
def package(session: nox.Session) -> None:
    """Build and check what would be published."""
    session.install("torch==2.13.0", "-e", ".[test]")
    session.run(".ci/package", external=True, env={"PYTHON": f"{session.bin}/python"})


@nox.session(python=False)
def resolutions(session: nox.Session) -> None:
    """Resolve every extra beside every torch; nothing is downloaded but metadata."""
    session.run("uv", "build", "--quiet", "--wheel", "--out-dir", "build/wheel", external=True)
    (wheel,) = Path("build/wheel").resolve().glob("*.whl")
    for torch in TORCHES:
        for extra in EXTRAS:
            file = wheel.parent / f"{torch}-{extra}.in"
            file.write_text(f"torch=={torch}\npytest-torchmem[{extra}] @ {wheel.as_uri()}\n")
            command = ("uv", "pip", "compile", "--quiet", "-p", "3.12", str(file))
            # The builds of the index, which pin what the extras bring.
            session.run(*command, silent=True, env={"UV_TORCH_BACKEND": None})
