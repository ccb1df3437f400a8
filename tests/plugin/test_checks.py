"""The fixture and the marker in whole runs: what passes, what fails, and what the message says."""

from unittest.mock import Mock

from pytest_torchmem.interception.facts import FactCollector
from pytest_torchmem.snapshots import compare
from pytest_torchmem.snapshots.files import committed_text
from tests.plugin.conftest import checking, git

ON_MODEL = "from model import *\n"
BODY = "def test_it():\n    make()(inputs()).sum().backward()\n"


def test_first_run_fails_and_names_the_command_that_helps(project):
    project.run(test_net=checking("make(), inputs()", head=ON_MODEL), failed=1).tells(
        ">*torchmem.check(make(), inputs())",
        "E * cpu, cuda (a100-80gb): there is no snapshot of this check in __torchmem__/tes*",
        "E * To create it: pytest --torchmem-update test_net.py::test_it",
        "To create missing snapshots: pytest --torchmem-update=new",
    )
    assert not project.file().exists()


def test_update_then_pass_then_grow(stored, monkeypatch):
    with monkeypatch.context() as patch:  # what explains figures is not computed to pass
        explaining = (compare, "alive_of"), (compare, "outline_of"), (FactCollector, "facts")
        for owner, name in explaining:
            patch.setattr(owner, name, Mock(side_effect=AssertionError(name)))
        stored.run(passed=2)
    stored.width(128)
    stored.run(failed=2).tells(
        "E * +6.50 KiB (+97.3 %) backward peak, cpu:*",
        "E * Sequential.0.weight is float32[[]128, 8[]], and was [[]64, 8[]]",
        "E * What changed at the backward peak*",
        "E * +2.00 KiB * float32[[]128, 8[]] (was [[]64, 8[]]), gradient*",
        "E * +2.00 KiB * float32[[]128, 8[]] (was [[]64, 8[]]), parameter*",
        "E * Largest figures, cpu; tolerance 1%*",
        "E *▲ * backward peak * KiB * KiB *+*KiB*",
        "E * If this is intended: pytest --torchmem-update test_net.py::test_first",
        "test_net.py::test_first",
        "  cpu * backward +*KiB (+*%)  grew",
        "3 memory checks: 3 grew",
    )


def test_the_message_names_the_source_line_that_grew(project):
    model = """
        import os
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

            def forward(self, x):
                for layer in self.layers:
                    x = layer(x)
                if os.environ.get("WIDTH"):
                    x = torch.cat([x] * 64, 1)
                return x
    """
    project.pytester.makepyfile(net=model)
    test = checking("Net(), torch.zeros(4, 8), device='cpu'", head="from net import *\n")
    project.run("--torchmem-update", test_net=test, passed=1)
    project.width(1)
    result = project.run()
    result.tells("E *MemoryCheckFailed: +* forward peak, cpu:*", "E *  aten::cat in Net, net.py:14")
    assert "differ" not in result.stdout.str(), "inputs and parameters are the same"
    project.run("--torchmem-github=always", "test_net.py").tells(
        "::error file=net.py,line=14,title=memory%3A test_net.py%3A%3Atest_it::+*%0A*"
    )
    project.write(net=project.read("net.py").replace("in self.", "in  self."))
    project.run("--torchmem-github=always", "test_net.py").tells("::error file=net.py,line=11,*")


def test_shrinking_passes_and_so_does_what_is_within_the_tolerance(stored):
    stored.width(32)
    stored.run(passed=2).tells(
        "improved: test_net.py::test_first, cpu, cuda (a100-80gb). To lock it in: "
        "pytest --torchmem-update test_net.py::test_first"
    )
    stored.run("--torchmem-strict", failed=2)
    stored.width(66)
    stored.run(failed=2)
    stored.run("--torchmem-tolerance=20%", passed=2)
    stored.run("--torchmem-tolerance=2KiB", passed=2)


BUDGETS = {
    "keeps": ('"1 GiB"', 'peak="1GiB",backward="1MiB",forward="1MiB",retained="1MiB"', 'gpu="t4"'),
    "exceeds": ('"1 KiB"', "1024", 'forward="1 KiB"', 'retained="10 B"'),
}


def test_budgets(project):
    tests = ["from model import *"]
    for name, markers in BUDGETS.items():
        for number, marker in enumerate(markers):
            on, step = (".cuda()" if "gpu" in marker else ""), f"test_{name}_{number}"
            tests += [
                f"@pytest.mark.memory_budget({marker})",
                f"def {step}_fixture(torchmem):\n    torchmem.check(make(), inputs())",
                f"@pytest.mark.memory_budget({marker})",
                f"def {step}_body():\n    make(){on}(inputs(){on}).sum().backward()",
            ]
    project.run("-k", "keeps", test_net="\n".join(tests), passed=6, deselected=8)
    result = project.run("-k", "exceeds", failed=8, deselected=6)
    said = r"(E +MemoryCheckFailed: )?[0-9].* exceeds the budget of .* by .*, cpu(, cuda.*)?"
    result.stdout.re_match_lines([said] * 8)
    result.tells(*["*Among the largest: *", "*Alive a*: *, of which * has to go*"] * 8)


def test_a_budget_that_is_not_kept_names_size_phase_and_line(project):
    result = project.run(
        test_net=f'{ON_MODEL}@pytest.mark.memory_budget(backward="1 KiB", device="cpu")\n{BODY}'
    )
    result.tells(
        "*KiB backward peak exceeds the budget of 1 KiB by *KiB (+*%), cpu",
        "test_net.py:2: MemoryCheckFailed",
        "test_net.py::test_it",
        "  cpu *backward *% of 1.00 KiB  over budget",
    )
    assert "hidden" not in result.stdout.str()


def test_a_budget_names_the_code_that_changed_last(project):
    project.write(f"{ON_MODEL}@pytest.mark.memory_budget('3 KiB', device='cpu')\n{BODY}")
    assert "changed last" not in project.run(failed=1).stdout.str(), "there is no repository"
    for words in ("init", "add .", "commit -m before"):
        git(project.path, *words.split())
    project.write(model=project.read("model.py").replace("64", "96"))
    for words in ("status", "commit -am now"):
        git(project.path, *words.split())
        committed_text.cache_clear()
        said = "Code that changed last, by git: model.py:7: return", "*, 96))  # was: 64"
        project.run(failed=1).tells(*said)


def test_a_body_that_leaves_a_named_device_alone_was_not_checked(project):
    test = f"{ON_MODEL}@pytest.mark.memory_budget('1 GiB'{{}})\n{BODY}"
    project.run(test_net=test.format(", device='cuda'"), failed=1).tells(
        "*not checked: nothing was allocated on cuda*"
    )
    # Where the devices are only those of the settings, one of them is enough.
    project.run(test_net=test.format(""), passed=1).tells("*cuda (a100-80gb) *not checked")


def test_a_device_that_was_chosen_on_import_names_the_way_out(project):
    test = (
        "import torch\nfrom model import *\n"
        "DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "pytestmark = pytest.mark.memory_budget('1 GiB', device='cuda')\n"
        "def test_it():\n    make().to(DEVICE)(inputs().to(DEVICE)).sum().backward()\n"
        "def test_half():\n    make().cuda()(inputs().to(DEVICE)).sum().backward()\n"
    )
    text = " ".join(project.run(test_net=test, failed=2).stdout.str().split())
    assert "no GPU: with --torchmem-fake-cuda there is one" in text
    assert "in the traced function, or run pytest with --torchmem-fake-cuda)" in text
    project.run("--torchmem-fake-cuda=h100", passed=2)


def test_of_a_marked_module_some_tests_may_allocate_nothing(project):
    test = f"{BODY}def test_names():\n    assert make.__name__ == 'make'\n"
    marked = f"{ON_MODEL}pytestmark = pytest.mark.memory_budget('1 GiB')\n{test}"
    told = project.run(test_net=marked, passed=2)
    told.tells("*1 test allocated nothing, so nothing was checked: *::test_names*")
    # On the GPU alone, the model may have been forgotten on the host.
    told = project.run(test_net=marked.replace("GiB'", "GiB', device='cuda'"), failed=2)
    told.tells("*not checked: nothing was allocated on cuda*")


def test_a_budget_needs_no_snapshot_unless_a_tolerance_asks_for_one_and_is_explained_by_it(project):
    mark = f"{ON_MODEL}@pytest.mark.memory_budget('1 MiB')\n"
    project.run(test_net=(test := checking("make(), inputs()", head=mark)), passed=1)
    project.run(test_net=test.replace("MiB'", "MiB', tolerance='5%'"), failed=1)
    project.run("--torchmem-update", test_net=test, passed=1)
    assert len(project.entries()) == 2
    project.width(6400)
    project.run(passed=1)
    project.width(64000)
    lines = ("*exceeds the budget of*", "*.weight is float32[[]64000, 8[]]*", "*What changed at*")
    project.run("--torchmem-markdown=m.md", failed=1).tells(*lines)
    assert "(was [64, 8])" in (project.path / "m.md").read_text()
    project.file().write_text("{")
    project.run(failed=1).tells("*Alive at*has to go*")


def test_a_whole_body_can_have_a_snapshot(project):
    body = f"{ON_MODEL}@pytest.mark.memory_budget(tolerance='0', device='cpu')\n{BODY}"
    project.run("--torchmem-update", test_net=body, passed=1)
    project.run(passed=1)
    project.width(65)
    project.run(failed=1).tells("*.weight is float32[[]65, 8[]], and was [[]64, 8[]]")
    project.width(64)
    result = project.run(test_net=body.replace("test_it", "test_renamed"))
    result.tells("*has an entry for test_it, which no longer exists*renamed*")
    more = body.replace("make()(inputs())", "(make()(inputs()).exp() * 2)")
    text = project.run(test_net=more, failed=1).stdout.str()
    assert "workload" not in text, "the same work that needs more"


def test_a_message_fits_behind_the_indentation_of_its_line(project):
    """80 columns hold every line but those of the source and of a command to be copied."""
    body = """
from model import *
class TestNet:
    def test_it(self, torchmem):
        if True:
            with torch.enable_grad():
                torchmem.check(make(), inputs(), device="cpu")

@pytest.mark.memory_budget("1 KiB", device="cpu")
def test_budget():
    make()(inputs()).sum().backward()
"""
    project.run("--torchmem-update", "-k", "test_it", test_net=body, passed=1)
    project.width(640)
    result = project.run(failed=2)
    shown = [line for line in result.outlines if line.startswith(("E ", "  ")) and len(line) > 80]
    shown = [line for line in shown if "torchmem-update" not in line and "class" not in line]
    assert not shown


def test_a_target_that_stays_on_the_cpu_gets_a_sentence(project):
    """What is wrong stands in the message; the failure ends at the test's own lines."""
    project.write("""
from model import *
def test_it(torchmem):
    target = torch.zeros(1)
    torchmem.check(
        make(), inputs(), device="cuda", loss_fn=lambda output: (output - target).sum() * target
    )

def test_usage(torchmem):
    torchmem.check(make(), inputs(), device="gpu")
""")
    text = project.run(failed=2).stdout.str()
    assert "'gpu' is not a device: write cpu, cuda or cpu,cuda" in text
    assert "write target.to(output.device) in loss_fn" in text
    assert "def check(" not in text, "no source of the plugin's"


def test_markers_combine_and_the_closest_wins(project):
    project.write("""
from model import *
pytestmark = pytest.mark.memory_budget("1 KiB", device="cpu")

@pytest.mark.memory_budget(peak="1 MiB")
class TestNet:
    def test_class_wins(self):
        make()(inputs()).sum().backward()

    @pytest.mark.memory_budget(peak="2 KiB", forward="1 MiB")
    def test_function_wins(self):
        make()(inputs()).sum().backward()

class TestDerived(TestNet):
    test_function_wins = None

@pytest.mark.memory_budget(peak="2 KiB")
class TestStricter(TestNet):
    test_function_wins = None

@pytest.mark.memory_budget("3 KiB")
@pytest.mark.parametrize("n", [
    pytest.param(1, marks=pytest.mark.memory_budget("1 GiB")),
    2,
])
def test_parameter(n):
    make()(inputs()).sum().backward()
""")
    project.run("--strict-markers", "-v").tells(
        "*test_class_wins PASSED*",
        "*test_function_wins FAILED*",
        "*TestDerived::test_class_wins PASSED*",
        "*TestStricter::test_class_wins FAILED*",
        "*test_parameter[[]1[]] PASSED*",
        "*test_parameter[[]2[]] FAILED*",
        "*exceeds the budget of 2 KiB*",
        "*exceeds the budget of 2 KiB*",
        "*exceeds the budget of 3 KiB*",
    )


def test_every_marker_that_cannot_be_read_is_told_with_its_test_and_line(project):
    project.write(
        """
from model import *

@pytest.mark.memory_budget("4 KiB", device="cpu")
@pytest.mark.memory_budget("1 GiB", forward="1 GiB")
def test_two():
    make()(inputs()).sum().backward()

@pytest.mark.memory_budget(tolerence="1%")
@pytest.mark.parametrize("n", [1, 2])
def test_misspelt(n):
    pass
""",
        test_other="def test_other():\n    pass\n",
    )
    project.run("--continue-on-collection-errors", errors=1, passed=1).tells(
        "test_net.py:4: test_two: two markers memory_budget at one place disagree: peak='1 *",
        "test_net.py:9: test_misspelt: *Did you mean 'tolerance'*",
    )


UNREADABLE = {
    "": "the marker memory_budget has no limit, so there is nothing to check",
    "device='cpu'": "the marker memory_budget has no limit",
    "'2 GB of ram'": "memory_budget(peak=): '2 GB of ram' is not a size: write an int",
    "backward=1.5": "memory_budget(backward=): 1.5 is not a size",
    "peak=1, limit=2": "got an unexpected keyword argument 'limit'. It is memory_budget(peak",
    "1, 2": "positional argument",
    "1, device='tpu'": "memory_budget(device=): 'tpu' is not a device",
    "1, gpu='gtx'": "'gtx' is not a known GPU",
    "tolerance='x'": "memory_budget(tolerance=): 'x' is not a tolerance",
}


def test_markers_that_cannot_be_read(project):
    test = "@pytest.mark.memory_budget({})\ndef test_it_{}({}):\n    raise SystemExit('ran')\n"
    tests = [
        test.format(marker, f"{number}_{argument}", argument)
        for number, marker in enumerate(UNREADABLE)
        for argument in ("", "torchmem")
    ]
    result = project.run(test_net="import pytest\n" + "".join(tests), errors=1)
    said = [line for line in result.outlines if line.startswith("test_net.py:")]
    for place, message in enumerate(one for one in UNREADABLE.values() for _ in range(2)):
        assert said[place].startswith(f"test_net.py:{3 * place + 2}: test_it_{place // 2}_")
        assert message in said[place]
    assert "'ran'" not in result.stdout.str()


WRONG = {
    "check(make(), inputs()); torchmem.check(make(), inputs())": "twice without a name",
    "check(make(), inputs(), name='a'); torchmem.check(make(), inputs(), name='a')": "name 'a'",
    "check(make(), inputs(), name='')": "check(name=''): expected a non-empty string",
    "check(make(), inputs(), device='tpu')": "check(device=): 'tpu' is not a device",
    "check(make(), inputs(), gpu='gtx')": "'gtx' is not a known GPU",
    "check(make(), inputs(), tolerance=0.1)": "check(tolerance=): 0.1 is not a tolerance",
    "check(make(), inputs(), host='here')": "must pass on others",
    "check(make(), torch.zeros(3, 3))": "RuntimeError: ",
    "check('text')": "expected an nn.Module or a callable",
}
MARKED = {
    "optimizer='1 GiB'|torchmem|torchmem.check(make(), inputs())": (
        "there is a limit for the optimizer peak, but this run never"
    ),
    "'1 GiB'|torchmem|pass": "never called torchmem.check",
    "'1 GiB'|request|request.getfixturevalue('torchmem').check(make(), inputs())": (
        "Request the fixture to trace only what you check: def test(torchmem)"
    ),
}


def test_wrong_calls_fail_and_are_not_checked(project):
    tests = [f"def test_{n}(torchmem):\n    torchmem.{body}\n" for n, body in enumerate(WRONG)]
    for n, (marker, argument, body) in enumerate(case.split("|") for case in MARKED):
        tests.append(
            f"@pytest.mark.memory_budget({marker}, device='cpu')\n"
            f"def test_marked_{n}({argument}):\n    {body}\n"
        )
    project.write(test_net="from model import *\n" + "".join(tests))
    result = project.run("--torchmem-update", failed=len(tests))
    sections = result.stdout.str().split("\n____")[1:]
    for message, section in zip((WRONG | MARKED).values(), sections, strict=True):
        assert message in " ".join(line.removeprefix("E").strip() for line in section.split("\n"))
    assert not project.file().exists()


def test_check_and_trace_return_profiles(project):
    project.write(
        test_net="""
from model import *

def test_it(torchmem):
    profiles = torchmem.check(make(), inputs(), gpu="h100")
    assert list(profiles) == ["cuda"]
    assert profiles["cuda"].gpu == "h100"
    profile = torchmem.trace(make(), inputs(), optimizer=torch.optim.AdamW)
    assert profile.device == "cpu"
    assert profile.optimizer_peak > profile.forward_peak
    assert torchmem.trace(make(), inputs(), gpu="t4").gpu == "t4"
    assert torchmem.trace(make(), inputs(), device="cuda").gpu == "l4"
"""
    )
    project.run("--torchmem-update", "--torchmem-gpu=l4", passed=1)
    assert project.entries()["test_it cuda"]["gpu"] == "h100"


def test_failures_are_the_tests_own(project):
    """Expected failures, ``-x``, ``--lf`` and JUnit see a check as any other assertion."""
    project.write("""
from model import *

@pytest.mark.xfail(strict=True, raises=AssertionError)
@pytest.mark.memory_budget("1 KiB")
def test_expected():
    make()(inputs())

@pytest.mark.memory_budget("1 KiB", device="cpu")
def test_first():
    make()(inputs())

def test_raises(torchmem):
    with pytest.raises(AssertionError, match="no snapshot"):
        torchmem.check(make(), inputs())

def test_last():
    pass
""")
    project.run("--junitxml=junit.xml", xfailed=1, failed=1, passed=2)
    xml = (project.path / "junit.xml").read_text()
    assert 'failures="1"' in xml
    assert 'errors="0"' in xml
    assert 'name="torchmem.cpu.peak.limit" value="1024"' in xml
    assert project.run("-x").parseoutcomes() == {"xfailed": 1, "failed": 1}
    project.run(cache=True)
    assert project.run("--lf", cache=True).parseoutcomes() == {"failed": 1}


def test_unittest_and_classes(project):
    project.write("""
import unittest
from model import *

class TestCase(unittest.TestCase):
    @pytest.mark.memory_budget("1 KiB")
    def test_body(self):
        make()(inputs())

    @pytest.mark.memory_budget("1 GiB")
    def test_fits(self):
        make()(inputs())

    @pytest.fixture(autouse=True)
    def _fixture(self, request):
        self.request = request

class TestFixture(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _fixture(self, torchmem):
        self.torchmem = torchmem

    def test_check(self):
        self.torchmem.check(make(), inputs())
""")
    result = project.run("--torchmem-update", failed=1, passed=2)
    result.tells("* peak exceeds the budget of 1 KiB*, cpu*")
    stored = {"TestCase::test_fits cpu", "TestFixture::test_check cpu"}
    assert {*project.entries()} == {*stored, "TestFixture::test_check cuda"}


def test_disable_runs_bodies_untraced_and_says_so(project):
    project.write("""
from model import *

@pytest.mark.memory_budget("1 KiB", device="cuda")
def test_body():
    value = make()(inputs()).sum().item()
    assert isinstance(value, float)

def test_fixture(torchmem):
    torchmem.check(make(), inputs())
""")
    project.run("--torchmem-disable", passed=1, skipped=1).tells("2 memory checks: 2 not checked")


def test_without_the_plugin_and_collect_only(project):
    project.run("-p", "no:torchmem", test_net="def test_it(): pass\n", passed=1)
    project.write(test_net="def test_it(torchmem): pass\n")
    result = project.run("--collect-only", "--torchmem-update")
    assert result.ret == 0
    assert "memory" not in result.stdout.str().partition("collected")[2]


def test_unstable_ids_are_warned_of(project):
    project.run(
        "--torchmem-update",
        test_net="""
from model import *

@pytest.mark.parametrize("x", [1], ids=["<object at 0x7f31c0a8>"])
def test_it(torchmem, x):
    torchmem.check(make(), inputs())
""",
    ).tells("*contains the address of an object*pytest.param(..., id=...)*")


def test_ids_that_two_tests_share_are_refused(project):
    project.write("""
from model import *

@pytest.mark.parametrize("a", ["x-y", "x"])
@pytest.mark.parametrize("b", ["z", "y-z"])
def test_it(torchmem, a, b):
    torchmem.check(make(), inputs())
""")
    result = project.run("--torchmem-update")
    outcomes = result.parseoutcomes()
    shared = "two tests of this module have the id" in result.stdout.str()
    # pytest itself may tell such ids apart; then nothing is shared and every test has its entry.
    assert shared == ("failed" in outcomes)
    if not shared:
        assert len(project.entries()) == 8


def test_missing_torch_is_one_clear_sentence(project, monkeypatch):
    conftest = """
import sys
sys.modules['torch'] = None
for name in [one for one in sys.modules if one.startswith('pytest_torchmem.tracing.trace')]:
    del sys.modules[name]
"""
    result = project.run_apart(conftest=conftest, test_net=checking("print"), failed=1)
    result.tells("*not checked: torch is not installed in this environment*")


def test_a_phase_of_the_snapshot_that_does_not_run_any_more_was_not_checked(project):
    test = checking("make(), inputs(), device='cpu', backward={}", head=ON_MODEL)
    project.run("--torchmem-update", test_net=test.format(True), passed=1)
    project.run(test_net=test.format(False), failed=1).tells(
        "*cpu: not checked: the snapshot has a backward peak, but this run never *"
    )
    project.run("--torchmem-update", passed=1)
    project.run(passed=1)
    assert "backward_peak" not in project.entries()["test_it cpu"]


def test_what_several_devices_share_is_said_once(project):
    test = checking("nn.Sequential(make(), nn.Dropout(0.5)), inputs()", head=ON_MODEL)
    project.run("--torchmem-update", test_net=test, passed=1)
    project.width(128)
    result = project.run()
    result.tells(
        "E *: +*KiB (+*%) backward peak, c*:*",
        "E * Sequential.0.0.weight is float32[[]128, 8[]], and was [[]64, 8[]]",
        "E *cuda (a100-80gb): for the same reason",
        "E * If this is intended*",
    )
    assert result.stdout.str().count(".weight is float32") == 1


def test_many_improvements_are_one_line(light):
    test = checking("int(os.environ.get('WIDTH', 1000))", over="range(11)")
    light.run("--torchmem-update", test_net=test, passed=11)
    light.width(500)
    light.run().tells("improved: 11 tests. To lock all of it in: pytest --torchmem-update=changed")


LEAK = """
import pytest, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), []

    def forward(self, x):
        y = self.linear(x)
        self.seen.append(y.detach().clone())
        return y

def test_leaks(torchmem):
    torchmem.check(Net(), torch.zeros(4, 8), optimizer=torch.optim.AdamW, growth="0")

@pytest.mark.memory_budget(growth="0", device="cpu")
def test_does_not():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.zeros(2, 8)).sum().backward()
        optimizer.step()

@pytest.mark.memory_budget(growth="0", device="cpu")
def test_one_step():
    nn.Linear(8, 8)(torch.zeros(2, 8)).sum().backward()

def test_of_inference(torchmem):
    torchmem.check(Net(), torch.zeros(4, 8), backward=False, growth="0")

def test_of_a_function(torchmem):
    model, losses = nn.Linear(8, 8), []
    def step():
        loss = model(torch.zeros(4, 8)).sum()
        loss.backward()
        losses[:] = [*losses, loss][-2:]
    torchmem.check(step, steps=5, growth="0")

@pytest.mark.memory_budget("1 MiB")
def test_function_that_does_not(torchmem):
    model = nn.Linear(8, 8)
    torchmem.check(lambda: model(torch.zeros(4, 8)).sum(), steps=3, growth="0")

def test_other():
    pass
"""


def test_growth_between_steps(project):
    project.pytester.makepyfile(net=LEAK, test_net="from net import *\n")
    run = project.run("-m", "torchmem", passed=2, failed=4, deselected=1)
    assert "To create it" not in run.stdout.str()
    run.tells(
        "E *: +128 B alive after a step and not before it, cpu: the",
        "E * list Net.seen (net.py:11) holds it, growth=0 B allows no more",
        "E * aten::clone in Net, net.py:11",
        "E * What stays after a step*",
        "E * +128 B  float32[[]4, 8[]], held by the program*",
        "*not checked: growth=0 B needs at least 3 steps, and this run made 1*",
        "E *: +128 B alive after a step and not before it, cpu: the",
        "E * list Net.seen (net.py:11) holds it, growth=0 B allows no more",
        "E *: +4 B alive after a step and not before it, cpu: the",
        "E * list losses of step (net.py:*) holds it, growth=0 B allows no more;",
        "E * of 8 steps or more only the later half counts",
    )


def test_a_marker_names_its_check_and_verbosity_has_an_ini_key(project):
    marker = "@pytest.mark.memory_budget(tolerance='1%', name='small', device='cpu')\n"
    project.run("--torchmem-update", test_net=f"{ON_MODEL}{marker}{BODY}", passed=1)
    assert [*project.entries()] == ["test_it small cpu"]
    assert "test_net.py::test_it · small" in project.run().stdout.str()
    quiet = project.run("-o", "verbosity_torchmem=-1").stdout.str()
    assert "test_net.py::test_it · small" not in quiet
