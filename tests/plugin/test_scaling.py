"""check(scaling=) and the marker: how fast memory may grow with sizes of the input."""

from tests.plugin.conftest import Project

NET = """
    import pytest, torch
    from torch import nn
    from torch.nn import functional

    class Net(nn.Module):
        def __init__(self, flash):
            super().__init__()
            self.flash, self.inner = flash, nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            if self.flash:
                return functional.scaled_dot_product_attention(q, k, v)
            return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    X = torch.randn(2, 128, 16)
"""


def test_attention_that_falls_back_to_quadratic_fails(project: Project) -> None:
    test = """
    @pytest.mark.memory_budget(scaling="linear in sequence and linear in batch", device="cpu")
    @pytest.mark.parametrize("flash", [True, False])
    def test(torchmem, flash):
        torchmem.check(Net(flash), X)
    """
    result = project.run("-p", "no:xdist", test_net=NET + test, passed=1, failed=1)
    result.tells("*the peak is quadratic in sequence, the budget allows linear: *sequence²·batch*")
    result.tells("*aten::*softmax*")


def test_sizes_of_a_function_and_of_a_module(project: Project) -> None:
    tests = """
    def build(sequence, flash=False):
        return Net(flash), torch.randn(2, sequence, 16)

    SIZES = {"sequence": [64, 128, 192]}

    def test_function(torchmem):
        torchmem.check(build, device="cuda", scaling="quadratic in sequence", sizes=SIZES)

    def test_module(torchmem):
        torchmem.check(Net(True), X, device="cuda", scaling="linear in sequence", sizes=SIZES)

    def test_fails(torchmem):
        torchmem.check(build, device="cuda", scaling="linear in sequence", sizes=SIZES)
    """
    project.run("-p", "no:xdist", "--torchmem-update", test_net=NET + tests, passed=2, failed=1)


WRONG = {
    'scaling="lineal in sequence"': "*expected one of constant, linear*",
    'scaling="linear in heads"': "*'heads' is no size of a module's inputs*",
    "scaling=3": "*expected one of constant, linear*",
}


def test_what_cannot_be_checked(project: Project) -> None:
    tests = [
        f"    def test_{number}(torchmem):\n        torchmem.check(Net(True), X, {arguments})\n"
        for number, arguments in enumerate(WRONG)
    ]
    body = """
    @pytest.mark.memory_budget(scaling="linear in sequence", device="cpu")
    def test_body():
        Net(True)(X).sum().backward()
    """
    project.write(test_net="".join((NET, "\n", *tests, body)))
    result = project.run("-p", "no:xdist", "--torchmem-update", failed=4)
    result.tells(*WRONG.values(), "*scaling= needs the step and its inputs*")
