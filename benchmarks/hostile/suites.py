"""Random suites, changed from run to run, and what each run must come to.

The oracle knows nothing of the package: it has the rules of the documentation.
"""

import json
import random
from dataclasses import dataclass, replace

from benchmarks.hostile.project import Project, Result, trouble

HEAD = """import contextlib, threading
from concurrent.futures import ThreadPoolExecutor
import pytest

@pytest.fixture
def breaks():
    yield
    assert False
"""
CHECK = "torchmem.check({size}, {identity!r}, device='cpu')"
KINDS = {
    "checks": "def {name}(torchmem):\n    {check}\n",
    "checks in a pool": "def {name}(torchmem):\n    with ThreadPoolExecutor() as pool:\n"
    "        pool.submit(lambda: {check}).result()\n",
    "fails before": "def {name}(torchmem):\n    assert False\n    {check}\n",
    "fails after": "def {name}(torchmem):\n    {check}\n    assert False\n",
    "breaks at the end": "def {name}(torchmem, breaks):\n    {check}\n",
    "is skipped": "@pytest.mark.skip\ndef {name}(torchmem):\n    {check}\n",
    "skips itself": "def {name}(torchmem):\n    pytest.skip('later')\n    {check}\n",
    "skips after": "def {name}(torchmem):\n    {check}\n    pytest.skip('later')\n",
    "is not run": "@pytest.mark.xfail(run=False)\ndef {name}(torchmem):\n    {check}\n",
    "fails as expected": "@pytest.mark.xfail\ndef {name}(torchmem):\n"
    "    {check}\n    assert False\n",
    "raises": "def {name}(torchmem):\n    with contextlib.suppress(ZeroDivisionError):\n"
    "        torchmem.check(lambda: 1 / 0, {identity!r}, device='cpu')\n",
    "swallows": "def {name}(torchmem):\n    with contextlib.suppress(Exception):\n"
    "        torchmem.check({size}, {identity!r}, device='gpu')\n",
    "loses in a thread": "def {name}(torchmem):\n    t = threading.Thread(\n"
    "        target=lambda: torchmem.check({size}, {identity!r}, device='gpu'))\n"
    "    t.start()\n    t.join()\n",
    "has a budget": "@pytest.mark.memory_budget('1 MiB', device='cpu')\n"
    "def {name}(torchmem):\n    {check}\n",
    "is over budget": "@pytest.mark.memory_budget('1 B', device='cpu')\n"
    "def {name}(torchmem):\n    {check}\n",
    "is plain": "def {name}():\n    pass\n",
    "exits": "def {name}():\n    pytest.exit('enough', returncode=0)\n",
    "is interrupted": "def {name}():\n    raise KeyboardInterrupt\n",
}
STOPS = ("exits", "is interrupted")
NO_CHECK = ("is plain", *STOPS)
SNAPSHOT = ("checks", "checks in a pool", "fails after", "breaks at the end", "skips after")
"""The kinds that ask their snapshot."""
HOLDS = (
    *(*SNAPSHOT, "fails before", "is skipped", "skips itself"),
    *("is not run", "fails as expected", "raises"),
)
"""The kinds whose entry, once there, belongs to a test that is still there."""
OF_ITSELF = {
    **dict.fromkeys(("fails before", "fails after", "breaks at the end", "swallows"), "failed"),
    **dict.fromkeys(("loses in a thread", "is over budget"), "failed"),
    **dict.fromkeys(("is skipped", "skips itself", "skips after"), "skipped"),
    **dict.fromkeys(("is not run", "fails as expected"), "xfailed"),
}


@dataclass(frozen=True, slots=True)
class Test:
    """A test; its identity stays when it is renamed."""

    identity: str
    name: str
    kind: str
    size: int

    def text(self) -> str:
        """Return its source."""
        check = CHECK.format(size=self.size, identity=self.identity)
        return KINDS[self.kind].format(
            name=self.name, size=self.size, identity=self.identity, check=check
        )


Suite = dict[str, list[Test]]


def hostile_suite(project: Project, chance: random.Random) -> list[str]:
    """Run a suite that changes a few times; return what was not as it must be."""
    counter = iter(range(1000))

    def new_test() -> Test:
        number, size = next(counter), chance.choice((1000, 1500, 2000))
        return Test(f"w{number}", f"test_{number}", any_kind(chance), size)

    suite = {
        f"test_m{number}": [new_test() for _ in range(chance.randint(1, 4))]
        for number in range(chance.randint(1, 3))
    }
    for number in range(chance.randint(3, 4)):
        write(project, suite)
        # Without snapshots from the beginning, nothing can be lost.
        found = step(project, suite, chance, whole=not number)
        if found:
            return [*found, json.dumps({m: [str(t) for t in tests] for m, tests in suite.items()})]
        suite = changed(suite, chance, new_test)
    return []


def any_kind(chance: random.Random) -> str:
    """Return a kind of test: often one that checks, seldom one that ends the run."""
    kind = "checks" if chance.random() < 0.6 else chance.choice(list(KINDS))
    return "is plain" if kind in STOPS and chance.random() < 0.7 else kind


def write(project: Project, suite: Suite) -> None:
    """Write the modules of a suite, and nothing else."""
    for path in project.path.glob("test_*.py"):
        path.unlink()
    for module, tests in suite.items():
        text = HEAD + "\n".join(test.text() for test in tests)
        (project.path / f"{module}.py").write_text(text)


def changed(suite: Suite, chance: random.Random, new_test) -> Suite:  # type: ignore[no-untyped-def]
    """Return a suite with tests renamed, changed, removed, added and moved, and modules renamed."""
    after: Suite = {}
    for module, tests in suite.items():
        kept = []
        for test in tests:
            what = chance.random()
            if what < 0.1:
                continue
            if what < 0.3:
                test = replace(test, name=f"{test.name}x")
            if chance.random() < 0.3:
                test = replace(test, kind=any_kind(chance))
            if chance.random() < 0.3:
                test = replace(test, size=chance.choice((1000, 1500, 2000)))
            kept.append(test)
        if chance.random() < 0.2:
            kept.append(new_test())
        if chance.random() < 0.05:
            continue
        after[f"{module}x" if chance.random() < 0.15 else module] = kept
    for tests in list(after.values()) if chance.random() < 0.3 else ():
        for test in tests[: chance.randint(0, 2)]:
            tests.remove(test)
            after[chance.choice(list(after))].append(test)
    return after


def step(
    project: Project, suite: Suite, chance: random.Random, *, whole: bool = False
) -> list[str]:
    """Run once, with random options or ``whole`` and updating, and compare with the oracle."""
    update = chance.choice(("", "all", "all", "all", "new", "changed", "obsolete"))
    update = "all" if whole else update
    options = [f"--torchmem-update={update}"] if update else []
    names = [test.name for tests in suite.values() for test in tests]
    narrowed = asked = ""
    takes_tests_away = False
    if names and not whole and chance.random() < 0.3:
        narrowed = chance.choice(("-k", "--deselect", "file"))
        asked = chance.choice([m for m, tests in suite.items() if tests])
        name = chance.choice(suite[asked]).name
        stays = {"-k": lambda t: name in t, "--deselect": lambda t: t != name, "file": bool}
        takes_tests_away = any(
            test.kind not in NO_CHECK and not stays[narrowed](test.name)
            for tests in suite.values()
            for test in tests
        )
        options += {
            "-k": ["-k", name],
            "--deselect": ["--deselect", f"{asked}.py::{name}"],
            "file": [f"{asked}.py"],
        }[narrowed]
    stops_early = not whole and chance.random() < 0.1
    options += ["-x"] if stops_early else []
    before = annotate(project, chance)
    files = project.files()
    result = project.run(*options)
    found = trouble(result)
    if not update and project.files() != files:
        found.append("files changed without an update")
    modes = {"new", "changed", "obsolete"} if update == "all" else {update}
    after = project.entries()
    found += wrong_outcomes(suite, before, modes, result)
    found += wrong_entries(suite, before, after, modes, result)
    for (module, name), entry in before.items():
        if "reason" not in entry or entry in after.values():
            continue
        note, identity = entry["reason"], entry["workload"]
        if any(e["workload"] == identity and e.get("reason") == note for e in after.values()):
            continue
        if takes_tests_away or (narrowed == "file" and asked != module):
            may_go = False
        else:
            may_go = "obsolete" in modes and may_be_removed(
                suite, before, after, (module, name), result
            )
        if not may_go:
            found.append(f"the note of {identity} is lost")
        elif note not in result.output:
            found.append(f"the note of {identity} is gone without a word")
    return [f"{options}: {line}" for line in found] + ([result.output[-3000:]] if found else [])


def annotate(project: Project, chance: random.Random) -> dict[tuple[str, str], dict]:  # type: ignore[type-arg]
    """Write notes into some entries, as people do; return all entries."""
    for name, content in project.files().items():
        data = json.loads(content)
        for entry in data["entries"]:
            if "reason" not in entry and chance.random() < 0.5:
                entry["reason"] = f"note {chance.random()}"
        (project.path / "__torchmem__" / name).write_text(json.dumps(data))
    return project.entries()


def may_be_removed(
    suite: Suite,
    before: dict,  # type: ignore[type-arg]
    after: dict,  # type: ignore[type-arg]
    key: tuple[str, str],
    result: Result,
) -> bool:
    """Tell whether an update may remove an entry: its test is gone for sure.

    Its module ran to its end and nothing in it failed; of a module that is gone, the whole run. No
    test that holds the entry, and has none of its own, is left there under any name, or elsewhere
    under the old one; or it has taken over another entry, or none of two that are as close.
    """
    (module, name), identity = key, before[key]["workload"]
    holds = [
        t.kind in HOLDS and (m == module or t.name == name or module not in suite)
        for m, tests in suite.items()
        for t in tests
        if t.identity == identity and ((m, t.name) == key or (m, t.name) not in before)
        if (m, t.name) not in after or not has_rival(suite, before, key, (m, t.name))
    ]
    ran = {m: tests for m, tests in suite.items() if m == module} or suite
    outcomes = [result.outcomes.get(f"{m}.py::{t.name}") for m, tests in ran.items() for t in tests]
    passed = all(outcome in ("passed", "skipped", "xfailed") for outcome in outcomes)
    return passed and not any(holds) and (module in suite or result.status in (0, 5))


def has_rival(
    suite: Suite,
    before: dict,  # type: ignore[type-arg]
    key: tuple[str, str],
    heir: tuple[str, str],
) -> bool:
    """Tell whether another entry has lost the same test, and is as close to its heir.

    That of the same name is closest, then one of the same module, then any other.
    """

    def distance(place: tuple[str, str]) -> int:
        return 0 if place[1] == heir[1] else 1 if place[0] == heir[0] else 2

    there = {(module, test.name) for module, tests in suite.items() for test in tests}
    return any(
        entry["workload"] == before[key]["workload"]
        and place not in there | {key}
        and distance(place) <= distance(key)
        for place, entry in before.items()
    )


def expected(test: Test, size: int | None, modes: set[str]) -> str:
    """Return the outcome of a test that runs, where its snapshot has ``size``."""
    if test.kind in OF_ITSELF and test.kind != "skips after":
        return OF_ITSELF[test.kind]
    if test.kind in SNAPSHOT:
        passes = size is not None and (test.size <= size or "changed" in modes)
        passes = passes or (size is None and "new" in modes)
        return OF_ITSELF.get(test.kind, "passed") if passes else "failed"
    return "passed"


def wrong_outcomes(suite: Suite, before: dict, modes: set[str], result: Result) -> list[str]:  # type: ignore[type-arg]
    """Return the tests whose outcome is not that of the oracle."""
    found = []
    for module, tests in suite.items():
        for test in tests:
            said = result.outcomes.get(f"{module}.py::{test.name}")
            entry = before.get((module, test.name))
            right = expected(test, entry["forward_peak"][0] if entry else None, modes)
            if said is not None and test.kind not in STOPS and said != right:
                found.append(f"{module}::{test.name} ({test.kind}) {said}, not {right}")
    failed = "failed" in result.outcomes.values()
    stopped = any(t.kind in STOPS for tests in suite.values() for t in tests)
    if failed and result.status == 0 and not stopped:
        found.append("a test failed, and the run did not")
    return found


def wrong_entries(
    suite: Suite,
    before: dict,  # type: ignore[type-arg]
    after: dict,  # type: ignore[type-arg]
    modes: set[str],
    result: Result,
) -> list[str]:
    """Return the entries that a run should have written or left and did not."""
    found = []
    for module, tests in suite.items():
        for test in tests:
            key = module, test.name
            old, now = before.get(key), after.get(key)
            passed = result.outcomes.get(f"{module}.py::{test.name}") == "passed"
            if passed and test.kind in SNAPSHOT and modes != {""}:
                accepts = "new" in modes if old is None else "changed" in modes
                if accepts and (now is None or now["forward_peak"][0] != test.size):
                    found.append(f"{module}::{test.name} was not written")
                    continue
                if accepts:
                    continue
            if old is not None and test.kind in HOLDS and now != old:
                found.append(f"the entry of {module}::{test.name} ({test.kind}) changed")
    return found
