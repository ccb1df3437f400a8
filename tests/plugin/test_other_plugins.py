"""Beside other plugins the same snapshots are written, and the same checks pass and fail.

Those that are not installed are skipped: ``pip install -e '.[test,plugins]'`` brings them.
"""

import json
import re
from typing import Any

import pytest

from tests.plugin.conftest import checking

TESTS = """
import pytest
def test_first(torchmem):
    torchmem.check(1000)
@pytest.mark.parametrize("n", [
    pytest.param(10, id="ten"),
    pytest.param(20, marks=pytest.mark.memory_budget("1 KiB")),
    pytest.param(30, marks=[pytest.mark.memory_budget("1 KiB", tolerance="1%"), pytest.mark.slow]),
    pytest.param(40, marks=pytest.mark.skip),
    pytest.param(50, marks=pytest.mark.xfail(reason="not yet", strict=True)),
])
def test_parameter(torchmem, n):
    torchmem.check(n, device="cpu")
    assert n != 50
@pytest.mark.parametrize("n", [1, 2], indirect=True)
class TestClass:
    @pytest.fixture
    def n(self, request):
        return 100 * request.param
    def test_method(self, torchmem, n):
        torchmem.check(n, name="method")
"""
PLAIN = "def test_plain(): pass\n"


@pytest.fixture
def written(light: Any) -> Any:
    """A project with snapshots, written without any other plugin's doing."""
    light.ini("markers = slow")
    light.run("--torchmem-update", test_net=TESTS, passed=6, skipped=1, xfailed=1)
    assert len(light.entries()) == 9
    return light


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("pytest_randomly", ["-p", "randomly", "-p", "no:random_order"]),
        ("random_order", ["--random-order"]),
        ("random_order", ["--random-order", "-n", "2"]),
        ("pytest_rerunfailures", ["--reruns", "2"]),
        ("xdist", ["-n", "2", "--dist", "loadscope"]),
        ("pytest_forked", ["--forked"]),
        ("pytest_forked", ["--forked", "-n", "2"]),
        ("pytest_timeout", ["--timeout", "60"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:3]),
)
def test_the_same_file_in_any_order_and_process(request, module, options):
    pytest.importorskip(module)
    written = request.getfixturevalue("written")
    if module == "pytest_forked":
        written.write(test_plain=PLAIN)
        if written.run_apart("--forked", "-p", "no:torchmem", "test_plain.py").ret:
            pytest.skip("pytest-forked does not work with this pytest")
        (written.path / "test_plain.py").unlink()
    with written.unchanged():
        written.run_apart("--torchmem-strict", *options, passed=6, skipped=1, xfailed=1)
        written.file().unlink()
        written.run_apart("--torchmem-update", *options, passed=6, skipped=1, xfailed=1)


def test_subtests_that_are_reported_before_their_test_is(light: Any) -> None:
    """Of an attempt that is repeated nothing is left, and of the last one everything."""
    pytest.importorskip("pytest_rerunfailures")
    pytest.importorskip("_pytest.subtests")
    test = """
import os
def test_parts(torchmem, subtests):
    for part in range(2):
        with subtests.test(part=part):
            torchmem.check({size} + part, name=f"part {{part}}", device="cpu")
    first = not os.path.exists("second")
    open("second", "w").close()
    assert {steady} or not first
"""
    light.run("--torchmem-update", test_net=test.format(size=1000, steady=True))
    assert len(light.entries()) == 2
    light.write(test_net=test.format(size=2000, steady=False))
    (light.path / "second").unlink()
    result = light.run("--torchmem-update", "--reruns=2", "-p", "rerunfailures")
    assert [entry["forward_peak"][0] for entry in light.entries().values()] == [2000, 2001]
    result.tells("2 memory checks: 2 updated")


def test_subtests_do_not_report_what_ends_a_pass(project: Any) -> None:
    pytest.importorskip("_pytest.subtests")
    body = "        assert float(torch.rand(3000, 3000).max()) < 2\n"
    test = "@pytest.mark.memory_budget('99 MiB', device='cpu')\n"
    project.run(
        "--torchmem-update",
        test_net="import pytest, torch, unittest\n"
        f"{test}def test_parts(subtests):\n    with subtests.test():\n{body}\n"
        f"class TestAll(unittest.TestCase):\n    {test}    def test_it(self):\n"
        f"      with self.subTest():\n{body}",
        passed=2,
    )


def test_split_parts_prove_nothing_and_write_what_they_ran(request: pytest.FixtureRequest) -> None:
    pytest.importorskip("pytest_split")
    written = request.getfixturevalue("written")
    with written.unchanged():
        for part in ("1", "2"):
            result = written.run_apart("--splits", "2", "--group", part, "--torchmem-update")
            assert result.ret == 0
            assert "obsolete" not in result.stdout.str()


@pytest.mark.parametrize("module", ["pytest_asyncio", "pytest_trio", "anyio"])
def test_asynchronous_tests(light: Any, module: str) -> None:
    pytest.importorskip(module)
    marker = module.removeprefix("pytest_")
    library = marker.replace("anyio", "asyncio")
    light.write(f"""
import pytest, {library}
@pytest.fixture
def anyio_backend(): return "asyncio"
@pytest.mark.{marker}
async def test_fixture(torchmem):
    await {library}.sleep(0)
    torchmem.check(1000, device="cpu")
    await {library}.sleep(0)
""")
    light.run_apart("--torchmem-update", passed=1)
    assert set(light.entries()) == {"test_fixture cpu"}
    light.run_apart(passed=1)
    light.edit("test_fixture cpu", peak=10)
    light.run_apart(failed=1)


@pytest.mark.parametrize(("module", "mark"), [("pytest_asyncio", "asyncio"), ("anyio", "anyio")])
def test_an_asynchronous_body_is_refused_in_one_sentence(light: Any, module: str, mark: str):
    pytest.importorskip(module)
    head = "import pytest\n@pytest.fixture\ndef anyio_backend(): return 'asyncio'\n"
    marked = f"{head}@pytest.mark.{mark}\n@pytest.mark.memory_budget('1 GiB')\n"
    result = light.run_apart(test_net=f"{marked}async def test_body():\n    pass\n", failed=1)
    told = " ".join(result.stdout.str().split())
    assert "test_body is asynchronous, so" in told
    assert "Use the fixture: async def test(torchmem), and in it" in told
    assert "contextlib" not in result.stdout.str()


def test_a_file_system_in_memory_hides_no_snapshot(project: Any) -> None:
    pytest.importorskip("pyfakefs")
    project.write("""
import os, pytest, torch
def step():
    torch.ones(int(open("/size").read()), requires_grad=True).sum().backward()
@pytest.mark.parametrize("turn", range(2))
def test_fake(fs, torchmem, turn):
    fs.create_file("/size", contents="8")
    torchmem.check(step, device="cpu")

def test_real(torchmem):
    torchmem.check(torch.nn.Linear(4, 4), torch.ones(1, 4), device="cpu")
    assert not os.path.exists("/size")
""")
    project.run_apart("--torchmem-update", passed=3)
    project.run_apart("--torchmem-strict", passed=3)
    project.edit("test_fake[1] cpu", peak=10)
    project.run_apart(passed=2, failed=1)


def test_benchmarks_have_the_figures(light: Any) -> None:
    pytest.importorskip("pytest_benchmark")
    test = "def test_it(torchmem, benchmark):\n    benchmark(int)\n    torchmem.check(1000)\n"
    light.run_apart("--torchmem-update", "--benchmark-json=times.json", test_net=test, passed=1)
    (one,) = json.loads(light.read("times.json"))["benchmarks"]
    assert one["extra_info"]["torchmem.cpu.peak"] == 2000


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "with workers"])
def test_html_reports_have_the_checks(light: Any, workers: tuple[str, ...]) -> None:
    pytest.importorskip("pytest_html")
    light.run_apart("--torchmem-update", test_net=checking("1000, device='cpu'"), passed=1)
    light.edit("test_it cpu", peak=10)
    light.run_apart("--html=page.html", *workers, failed=1)
    (asset,) = (light.path / "assets").glob("*.txt")
    text = asset.read_text()
    assert re.search(r"^cpu\nbaseline +500 B\nforward peak +1000 B$", text, re.M)
    assert "If this is intended: pytest --torchmem-update" in text


def test_allure_has_the_checks(light: Any) -> None:
    pytest.importorskip("allure")
    test = checking("1000, name='step'")
    light.run_apart("--torchmem-update", "--alluredir=allure", test_net=test, passed=1)
    (result,) = (light.path / "allure").glob("*-result.json")
    attached = json.loads(result.read_text())["attachments"]
    assert [one["name"] for one in attached] == ["memory: step"] * 2
    assert "peak" in (light.path / "allure" / attached[0]["source"]).read_text()


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "with workers"])
def test_a_run_without_memory_tests_imports_next_to_nothing(pytester, workers):
    pytester.makepyfile("def test_nothing(): pass")
    pytester.makeconftest(
        """
        import sys
        def pytest_unconfigure():
            ours = [name for name in sys.modules if name.startswith("pytest_torchmem")]
            assert 5 < len(ours) < 15, ours
            assert "torch" not in sys.modules
        """
    )
    result = pytester.runpytest_subprocess(*workers)
    result.assert_outcomes(passed=1)
    assert result.ret == 0
