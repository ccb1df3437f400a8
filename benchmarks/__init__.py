"""What the figures in the documentation come from; run from the root of the repository."""

import argparse


def command(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m benchmarks.NAME``, described by a docstring."""
    first = (docstring or "").partition("\n")[0]
    return argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=first)
