"""The pytest plugin: hooks, options, fixture, marker, run.

pytest is kept from rewriting the assertions of this package. It reads the modules of every plugin's
distribution through a hook of its own (``_pytest/config/__init__.py``,
``_mark_plugins_for_rewrite``). Its byte code is not the one that pip made when it installed the
package: in a fresh container all of it is compiled again, a second for a first memory check, and
after that read more slowly. The assertions here are for type checkers; nobody reads their failures
in a test.
"""

import sys


def leave_this_package_alone() -> None:
    """Take what is of this package out of the names of modules that pytest's hooks rewrite."""
    package = __name__.partition(".")[0]
    for finder in sys.meta_path:
        marked: set[str] = getattr(finder, "_must_rewrite", set())
        if own := {name for name in marked if name.partition(".")[0] == package}:
            marked -= own
            getattr(finder, "_marked_for_rewrite_cache", {}).clear()


leave_this_package_alone()  # before pytest imports the first of them
