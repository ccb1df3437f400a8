"""Memory as a polynomial of sizes: sizes that were not traced are predicted to the byte."""

import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pytest_torchmem import largest, scaling, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.graphs.fitting import Grid, Polynomial
from tests.modules import Parts


class Attention(Parts):
    """One layer; ``flash`` says whether scores are made."""

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        if self.flash:
            return functional.scaled_dot_product_attention(query, key, value)
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value


def attention(flash: bool) -> Any:
    def build(batch: int, sequence: int) -> tuple[nn.Module, Tensor]:
        return Attention(flash=flash, inner=nn.Linear(32, 96)), torch.randn(batch, sequence, 32)

    return build


SIZES = {"batch": [2, 4], "sequence": [256, 512]}


@given(
    st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 1)), st.integers(-9, 9)),
    st.sets(st.integers(1, 50), min_size=3, max_size=4),
    st.sets(st.integers(1, 50), min_size=2, max_size=3),
)
def test_the_polynomial_through_values_of_one_is_that_one(terms, ones, others):
    exact = {key: Fraction(value) for key, value in terms.items() if value}
    polynomial = Polynomial(("a", "b"), exact)
    grid = Grid({"a": sorted(ones), "b": sorted(others)})
    values = [int(polynomial(point)) for point in grid.points]
    assert grid.through(values).terms == exact


def test_polynomials_read_as_people_write_them() -> None:
    terms = {(1, 2): Fraction(32), (1, 0): Fraction(5, 2), (0, 0): Fraction(1000)}
    assert str(Polynomial(("b", "s"), terms)) == "32·b·s² + 5/2·b + 1,000"
    assert str(Polynomial(("b",), {})) == "0"


@pytest.mark.parametrize(("flash", "device"), [(True, "cuda"), (False, "cpu")])
def test_sizes_that_were_not_traced_are_predicted_to_the_byte(flash: bool, device: str) -> None:
    build, options = attention(flash), {"device": device, "optimizer": torch.optim.AdamW}
    found = scaling(build, options=options, **SIZES)
    assert found.exact
    assert found.verified
    smallest = found.sizes["sequence"][0]
    for batch, sequence in ((16, smallest + 128), (12, smallest + 640), (10, 2 * smallest)):
        figures = trace(*build(batch, sequence), **options).figures()
        predicted = found.predict(batch=batch, sequence=sequence)
        assert predicted == {name: figures[name] for name in predicted}
        assert "peak" in predicted


def test_attention_that_makes_scores_is_quadratic_and_names_them() -> None:
    linear, quadratic = scaling(attention(True), **SIZES), scaling(attention(False), **SIZES)
    assert linear.degree("sequence") == linear.degree("batch") == 1
    assert quadratic.degree("sequence") == 2
    assert quadratic.degree("batch") == 1
    assert quadratic.fastest("sequence")[0].origin.module == "Attention"
    # softmax keeps what it returns, and its backward makes another of the same size
    assert quadratic.polynomial("forward_peak").terms[1, 2] == 2 * 4 * 4
    assert "batch·sequence²" in quadratic.table()


def test_coefficients_add_up_by_module_and_operator() -> None:
    found = scaling(attention(False), **SIZES)
    for figure in ("peak", "forward_peak", "backward_peak"):
        whole = found.polynomial(figure)
        for parts in (found.by_module(figure), found.by_operator(figure)):
            assert sum(one.terms.get((1, 2), 0) for one in parts.values()) == whole.terms[1, 2]
    large = {"batch": 4096, "sequence": 1 << 20}
    assert int(found.polynomial()(large)) == found.predict(**large)["peak"]


def test_a_power_that_two_values_do_not_show_is_found() -> None:
    def build(width: int) -> Any:
        return lambda: torch.zeros(width * width * width, dtype=torch.int8)

    found = scaling(build, width=[2, 3])
    assert found.degree("width") == 3
    for wrong in (-1, "3"):
        with pytest.raises(UsageError, match="a whole number from 1 on"):
            found.predict(width=wrong)  # type: ignore[arg-type]
    assert found.predict(width=11)["peak"] == 11**3


@pytest.mark.parametrize("draw", ["torch", "python"])
@pytest.mark.parametrize("share", [0.0, 0.01])
def test_layers_that_random_numbers_skip_make_a_prediction_an_estimate(draw, share):
    class Skips(Parts):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if (torch.rand([]) if draw == "torch" else random.random()) >= share:
                    x = layer(x)
            return x.clone()

    def build(batch: int) -> tuple[nn.Module, Tensor]:
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        return Skips(layers=layers), torch.randn(batch, 4, requires_grad=True)

    predicted = scaling(build, batch=[2, 3]).predict(batch=9)
    assert predicted.exact == (not share)
    assert any("random numbers decide" in one for one in predicted.doubts) == bool(share)


def test_what_is_cut_into_blocks_has_the_power_that_it_grows_with() -> None:
    def build(size: int) -> Any:
        return lambda: torch.zeros(-(-size // 64) * 64, dtype=torch.int8)

    found = scaling(build, size=[100, 200, 300])
    assert not found.exact
    assert found.degree("size") == 1


def test_what_no_polynomial_gives_is_asked_of_its_operator_or_told() -> None:
    # Few rows are summed up by one block of threads, many by several that write partial sums.
    def build(rows: int) -> Any:
        return lambda: torch.zeros(rows, 64, device="cuda").sum(0)

    found = scaling(build, rows=[100, 200], options={"device": "cuda"})
    predicted = found.predict(rows=9000)
    assert predicted.items() <= trace(build(9000), device="cuda").figures().items()
    assert predicted.exact
    assert found.polynomial()({"rows": 9000}) < predicted["peak"]

    found = scaling(lambda size: lambda: torch.zeros(-(-size // 64) * 64), size=[100, 200, 300])
    assert found.predict(size=150).doubts == ("aten::zeros is no polynomial of the sizes",)


def test_a_size_that_the_program_rounds_is_told() -> None:
    def build(length: int) -> Any:
        return lambda: nn.MaxPool1d(2)(torch.zeros(2, 3, length)) + 1

    found = scaling(build, length=[64, 128])
    assert found.exact
    assert found.predict(length=512).exact
    [doubt] = found.predict(length=511).doubts
    assert doubt.endswith("is 1/2·length, which is 255.5: how the program rounds it is not known")
    assert "an estimate: " in repr(found.predict(length=511))


def test_a_batch_of_one_may_go_a_way_of_its_own() -> None:
    def build(batch: int) -> Any:
        def step() -> None:
            x = torch.zeros(batch, 8)
            x if batch > 1 else x + 1

        return step

    found = scaling(build, batch=[1, 2, 4])
    assert found.sizes["batch"] == (2, 4, 6)
    assert found.predict(batch=5)["peak"] == 5 * 32


def test_a_program_of_many_ways_is_refused_with_the_place() -> None:
    def build(size: int) -> Any:
        return lambda: [torch.ones(size) + 1 for _ in range(size)]

    with pytest.raises(UsageError, match="makes other storages with size="):
        scaling(build, size=[2, 3])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "at least one size"),
        ({"batch": [2]}, "two or more"),
        ({"batch": 2}, "two or more"),
        ({"batch": [0, 1]}, "from 1 on"),
        ({"length": [1, 2]}, "is called with length="),
    ],
)
def test_sizes_that_cannot_be_fitted(sizes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scaling(attention(True), **sizes)
    with pytest.raises(UsageError, match="expected a module"):
        scaling(lambda batch: 3, batch=[1, 2])


class TestLargest:
    @staticmethod
    def build(batch: int) -> tuple[nn.Module, Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        return model, torch.empty(batch, 1024, device="meta")

    def test_one_more_does_not_fit(self) -> None:
        options = {"memory": "1 GiB", "optimizer": torch.optim.SGD}
        found = largest(self.build, **options)
        assert found.profile is not None
        assert "memory" in str(found.error)
        trace(*self.build(found.size), device="cuda", **options)
        with pytest.raises(torch.OutOfMemoryError):
            trace(*self.build(found.size + 1), device="cuda", **options)
        assert found.traces < 24

    def test_nothing_fits(self) -> None:
        found = largest(self.build, memory="520 MiB")
        assert (found.size, found.profile) == (0, None)
        assert found.error is not None

    def test_everything_fits(self) -> None:
        found = largest(self.build, gpu="h100", most=5)
        assert (found.size, found.error) == (5, None)

    def test_a_limit_is_needed(self) -> None:
        with pytest.raises(UsageError, match="gpu= or memory="):
            largest(self.build)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"start": 0}, "1 <= start"),
            ({"start": 1.5}, "whole numbers"),
            ({"fixed": {"batch": 1}}, "without 'batch'"),
            ({"fixed": [1]}, "other sizes by name"),
            ({"device": "cpu"}, "leave out device="),
            ({"size": "sequence"}, "is called with sequence="),
        ]
        for options, message in wrong:
            with pytest.raises(UsageError, match=message):
                largest(self.build, gpu="t4", **options)
        model: Any = nn.Linear(2, 2)
        with pytest.raises(UsageError, match="expected a function of the sizes"):
            largest(model, gpu="t4")


def test_what_builds_a_step_may_put_it_on_the_gpu() -> None:
    def build(batch: int) -> tuple[nn.Module, Tensor]:
        return nn.Linear(64, 64).cuda(), torch.randn(batch, 64, device="cuda")

    def on_host(batch: int) -> tuple[nn.Module, Tensor]:
        return nn.Linear(64, 64), torch.randn(batch, 64)

    options = {"device": "cuda"}
    first, second = (scaling(one, batch=[2, 4], options=options) for one in (build, on_host))
    assert first.polynomial() == second.polynomial()
