"""The command that updates one test, as people can type it."""

from __future__ import annotations

import shlex

_UPDATE = "pytest --torchmem-update"


def update_command(path: str, test: str) -> str:
    """Return the command that accepts what a test of the module at ``path`` does now.

    A parameter that cannot be typed (a line end, an escape, a letter that is not seen) is left
    out, and so are the parts before it that cannot: the function, or the module, is updated whole.
    """
    while not test.isprintable():
        function, bracket, _ = test.partition("[")
        test = function if bracket else test.rpartition("::")[0]
    if "[" in path or not path.isprintable():
        # pytest takes what follows a bracket for a parameter (_pytest/main.py,
        # resolve_collection_argument), so no argument names such a file.
        name = test.partition("[")[0].rpartition("::")[2]
        return f"{_UPDATE} -k {name}" if name.isidentifier() else _UPDATE
    if path.startswith(("-", "@")):  # an option, or a file of arguments
        path = f"./{path}"
    return f"{_UPDATE} {shlex.quote('::'.join(filter(None, (path, test))))}"
