"""What is known to take nothing, and that whatever is not is named, on both devices."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_torchmem import trace
from pytest_torchmem.interception.plan import remembered_plans
from pytest_torchmem.operators.registry import record_of
from pytest_torchmem.operators.workspace_of import is_iterated, takes_nothing

samples = pytest.importorskip("benchmarks.conformance.samples")

from benchmarks.isolation.sample import NothingToDifferentiate  # noqa: E402
from tests.conformance.operators import OPERATORS  # noqa: E402

aten = torch.ops.aten


@torch.library.custom_op("torchmem_tests::unmodelled", mutates_args=())
def unmodelled(x: Tensor) -> Tensor:
    """Take what nobody has described."""
    raise AssertionError


unmodelled.register_fake(lambda x: x.new_empty(5))


def test_a_custom_operator_that_nobody_modelled_is_unknown(device: str) -> None:
    profile = trace(lambda: unmodelled(torch.ones(3, device=device)), device=device)
    assert profile.unknown_workspaces == ("torchmem_tests::unmodelled",)
    (warning,) = profile.warnings
    assert warning == "the workspace of torchmem_tests::unmodelled is unknown and not included"
    assert profile.peak == 12 + 20


def test_an_operator_that_leaves_the_table_is_unknown(monkeypatch, device):
    def program() -> Tensor:
        return torch.ones(3, 4, device=device).flip(0)

    assert trace(program, device=device).unknown_workspaces == ()
    monkeypatch.setattr(record_of("aten::flip"), "takes_nothing", frozenset())
    remembered_plans.cache_clear()
    try:
        assert trace(program, device=device).unknown_workspaces == ("aten::flip",)
    finally:
        remembered_plans.cache_clear()


@pytest.mark.parametrize("name", OPERATORS)
def test_the_workspace_of_every_sample_is_known(name: str) -> None:
    suite, _, operator = name.partition(":")
    units = samples.units(f"^{operator}$", [suite], ["float32"], ["contiguous"])
    found = {unknown for unit in units for one in samples.samples(unit, 2) for unknown in told(one)}
    assert found == set()


def told(sample: Any) -> tuple[str, ...]:
    """Return the operators of unknown workspace in a sample's trace."""
    options = {**sample.options, **sample.kwargs}
    try:
        return trace(sample.target, *sample.args, **options).unknown_workspaces
    except NothingToDifferentiate:
        return trace(sample.target, *sample.args, backward=False, **options).unknown_workspaces


@pytest.mark.parametrize(
    ("overload", "cpu", "cuda"),
    [
        (aten.relu_.default, True, True),
        (aten.cat.default, False, True),
        (aten.empty.memory_format, True, True),
        (aten.uniform_.default, True, True),
        (aten.topk.default, True, False),
        (aten._sample_dirichlet.default, False, True),
        (aten.hann_window.default, False, True),
        (aten.linalg_matrix_exp.default, False, False),
        (aten.linalg_eig.default, False, False),
        (aten.add.Tensor, True, True),
        (aten.add_.Tensor, True, True),
        (aten.copy_.default, False, True),
        (aten.zeros.default, True, True),
        (aten.dropout.default, False, False),
        (aten.native_dropout.default, False, True),
        (aten._fused_adamw_.default, True, True),
        (aten._fused_moving_avg_obs_fq_helper.default, False, False),
    ],
)
def test_a_table_says_it_of_each_device(overload: Any, cpu: bool, cuda: bool) -> None:
    assert (takes_nothing(overload, "cpu"), takes_nothing(overload, "cuda")) == (cpu, cuda)


def test_the_cpu_copies_what_is_not_of_the_common_type() -> None:
    def program(dtype: torch.dtype) -> Tensor:
        return torch.addr(torch.ones(4, 4, dtype=dtype), torch.ones(4), torch.ones(4))

    assert not is_iterated(aten.masked_fill_.Scalar)
    assert trace(lambda: program(torch.float32)).unknown_workspaces == ()
    assert trace(lambda: program(torch.float64)).unknown_workspaces == ("aten::addr",)


@pytest.mark.parametrize(
    ("body", "nbytes"),
    [
        (lambda x: x.int().cumsum(0), 8000),
        (
            lambda x: torch.nn.functional.nll_loss(
                x.view(4, 250).t(), torch.zeros(500).long()[::2]
            ),
            0,
        ),
        (lambda x: torch.linalg.solve_triangular(torch.eye(9), torch.ones(4, 9, 2), upper=True), 0),
        (lambda x: torch.normal(x, 2.0), 4000),
        (lambda x: torch.randperm(50), 8),
        (lambda x: torch.bucketize(x, torch.arange(4)), 16),
        (lambda x: torch.repeat_interleave(torch.ones(10).long()), 80),
        (lambda x: x.int().__ilshift__(2), 12),
        (lambda x: torch._weight_norm_interface(x.view(2, 500), torch.ones(1, 500), 1), 0),
        (lambda x: torch.nn.functional.rrelu_(x), 48),
        (lambda x: torch.cat([x, x.long(), x.bfloat16()]), 8000),
        (lambda x: torch.stack([x.bool(), x], 1), 1000),
        (lambda x: torch.cat([x, x], out=torch.empty(2000, dtype=torch.float64)), 4000),
        (lambda x: torch.hann_window(64), 12),
        (lambda x: torch.bartlett_window(64, periodic=False, dtype=torch.float64), 16),
        (lambda x: torch.blackman_window(63, dtype=torch.float16), 4 * 128 + 10),
        (lambda x: torch.kaiser_window(64, True, 4.0), 260),
        (lambda x: torch.hamming_window(1), 0),
        (lambda x: torch._sample_dirichlet(x.view(10, 100).t()), 8800),
        (lambda x: torch.binomial(x.view(10, 100).t(), x.view(10, 100).t()), 0),
        (lambda x: torch.normal(x, x, out=torch.empty(1000)), 17),
        (
            lambda x: torch.nn.functional.multi_margin_loss(
                x.view(250, 4).t(), torch.zeros(8).long()[::2], weight=torch.ones(500)[::2]
            ),
            4000 + 32 + 1000,
        ),
        (lambda x: torch._addmm_activation(x[:2], torch.ones(3, 4), torch.ones(4, 2)), 0),
        (lambda x: torch._transform_bias_rescale_qkv(torch.ones(2, 3, 24), x[:24], 2), 0),
    ],
)
def test_what_was_counted_as_nothing_is_as_measured(body: Any, nbytes: int) -> None:
    from pytest_torchmem import measure

    def program() -> Any:
        return body(torch.ones(1000))

    profile = trace(program, host="here")
    assert (profile.unknown_workspaces, profile.peak) == ((), measure(program).peak)
    taken = [one.nbytes for one in profile.timeline.allocations if one.kind.value == "workspace"]
    assert not nbytes or nbytes in taken
