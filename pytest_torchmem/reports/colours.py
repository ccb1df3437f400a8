"""Growth in red and what shrank in green, where a terminal shows colours."""

from __future__ import annotations

import os
import re
from typing import TextIO

_SIZE = re.compile(
    r"(?<![\w.])(?P<sign>[+-])\d[\d.]* (?:B|KiB|MiB|GiB|TiB)\b(?: \([+-][\d.]+ %\))?"
)
_CODES = {"+": 31, "-": 32}


def shows_colours(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours.

    ``NO_COLOR`` says that it does not (https://no-color.org), ``FORCE_COLOR`` that anything does.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(text: str, stream: TextIO) -> str:
    """Return ``text`` with sizes that have a sign in colours, if ``stream`` shows these."""
    if not shows_colours(stream):
        return text
    return _SIZE.sub(lambda size: f"\033[{_CODES[size['sign']]}m{size[0]}\033[0m", text)
