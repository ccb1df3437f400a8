"""Keeps pytest from rewriting the assertions of this package.

pytest reads the modules of every plugin's distribution through a hook of its own, which rewrites
their ``assert`` statements (``_pytest/config/__init__.py``, ``_mark_plugins_for_rewrite``). Its
byte code is not the one that pip made when it installed the package: in a fresh container all of
it is compiled again, a second for a first memory check, and after that read more slowly. The
assertions here are for type checkers; nobody reads their failures in a test.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = __name__.partition(".")[0] + "."
_HOOK = "_pytest.assertion.rewrite"


class _PastRewriting(MetaPathFinder):
    """Finds the modules of this package as Python does by itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module of this package is, and leave all others to who comes next."""
        if not fullname.startswith(_PACKAGE):
            return None
        return PathFinder.find_spec(fullname, path, target)


_FINDER = _PastRewriting()


def leave_this_package_alone() -> None:
    """Find modules of this package before pytest's hook does, as long as that hook is there.

    Those that other hooks find before it, as a type checker's, they find still.
    """
    stop_leaving_alone()
    for position, finder in enumerate(sys.meta_path):
        if type(finder).__module__ == _HOOK:
            sys.meta_path.insert(position, _FINDER)
            return


def stop_leaving_alone() -> None:
    """Undo ``leave_this_package_alone``."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _FINDER]
