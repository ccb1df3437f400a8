"""What a user does wrong is said with what to do."""

import re

import pytest
import torch
from torch import Tensor, nn

from pytest_torchmem import measure, trace
from pytest_torchmem.errors import UnsupportedOperatorError, UnsupportedTorchError, UsageError
from pytest_torchmem.torch_private import self_test


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "tpu"}, "'cpu', 'cuda'"),
        ({"device": "cuda", "gpu": "a1000"}, "Did you mean 'a100-80gb'"),
        ({"host": "there"}, "'reference', 'here'"),
        ({"steps": 0}, "at least 1"),
        (
            {"optimiser": torch.optim.SGD},
            "optimiser=...\\) is no argument. Did you mean 'optimizer'",
        ),
        ({"optimizer": torch.optim.SGD, "backward": False}, "leave backward=True"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace(nn.Linear(2, 2), torch.randn(1, 2), **arguments)  # type: ignore[arg-type]


def test_a_misspelt_argument_of_a_measurement_is_refused() -> None:
    with pytest.raises(UsageError, match=r"measure\(optimiser=...\).* Did you mean 'optimizer'"):
        measure(nn.Linear(2, 2), torch.randn(1, 2), optimiser=torch.optim.SGD)


def test_arguments_and_errors_of_the_program_are_its_own() -> None:
    class Model(nn.Linear):
        def forward(self, input: torch.Tensor, optimiser: int = 0) -> torch.Tensor:
            return super().forward(input) * optimiser

    assert trace(Model(2, 2), torch.randn(1, 2), optimiser=2).peak
    with pytest.raises(RuntimeError, match=r"1x3 and 2x2"):
        trace(nn.Linear(2, 2), torch.randn(1, 3))


def test_operator_without_geometry_is_named() -> None:
    library = torch.library.Library("torchmem_test", "FRAGMENT")
    try:
        library.define("mystery(Tensor x) -> Tensor")
        with pytest.raises(UnsupportedOperatorError, match="torchmem_test::mystery") as raised:
            trace(lambda: torch.ops.torchmem_test.mystery(torch.randn(3)), values="none")
        assert "torch.library.register_fake" in str(raised.value)
        torch.library.register_fake("torchmem_test::mystery", torch.empty_like)
        assert (
            trace(lambda: torch.ops.torchmem_test.mystery(torch.randn(3)), values="none").peak == 24
        )
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("name", "replacement", "message"),
    [
        ("tensors.storage_address", lambda tensor: 0, "a storage without memory is not kept"),
        ("tensors.sequence_number", lambda: 0, "`_get_sequence_nr` returned an unexpected value"),
        ("dispatcher.autocast_key_included", lambda _: None, r"kernels ran for \['AutocastIPU'\]"),
        ("self_test.run_cpu_kernel", lambda *_: 0, "does not run by its dispatch key"),
        ("keys.find_operator", lambda name: None, "has no kernel of its own"),
        ("tensors.current_node", lambda: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_unknown_torch_is_one_sentence(monkeypatch, name, replacement, message):
    monkeypatch.setattr(self_test, "_try_once", self_test._try_once.__wrapped__)
    monkeypatch.setattr(f"pytest_torchmem.torch_private.{name}", replacement)
    with pytest.raises(UnsupportedTorchError, match=r"cannot trace on torch \d") as raised:
        trace(nn.Linear(2, 2), torch.randn(1, 2), device="cuda")
    assert re.search(message, str(raised.value))
    assert "\n" not in str(raised.value)


def test_a_compiled_module_is_traced_eagerly_if_asked_for_and_says_so() -> None:
    model = torch.compile(nn.Linear(8, 8), backend="eager")
    profile = trace(model, torch.randn(2, 8), mode="eager")
    assert profile.figures() == trace(nn.Linear(8, 8), torch.randn(2, 8)).figures()
    assert any("torch.compile" in warning for warning in profile.warnings)


@pytest.mark.parametrize("run", [trace, measure])
def test_a_backward_without_gradients(run: object) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.no_grad():
        for loss_fn in (None, Tensor.sum):
            with pytest.raises(UsageError, match="gradients are off around the step"):
                run(model, x, loss_fn=loss_fn)  # type: ignore[operator]
        run(model, x, backward=False)  # type: ignore[operator]
