"""The table of operators: its totals are the profile's, its cells what autograd really saves."""

import csv
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from pytest_torchmem import measure, node_table, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.operators.registry import load, records
from pytest_torchmem.profile.node_table import COLUMNS, NodeRow, NodeTable
from pytest_torchmem.torch_private.names import TORCH_VERSION
from tests.modules import Checkpointed, Parts
from tests.tracing.programs import MODELS, PROGRAMS

FIGURES = ("forward_peak", "backward_peak", "optimizer_peak", "peak")


def row_of(table: NodeTable, operator: str) -> NodeRow:
    [row] = [row for row in table if row.operator == operator]
    return row


@pytest.mark.parametrize("name", MODELS)
def test_totals_are_the_peaks_of_the_profile(name: str, device: str) -> None:
    build, make_input = MODELS[name]
    profile = trace(build(), make_input(), optimizer=torch.optim.AdamW, device=device)
    for table in (profile.node_table(), profile.node_table().folded()):
        assert table.peaks() == {name: getattr(profile, name) for name in FIGURES}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_totals_of_programs(program: Callable[[], None]) -> None:
    profile = trace(program)
    expected = {name: profile.figures()[name] for name in FIGURES if name in profile.figures()}
    assert profile.node_table().peaks() == expected


class Saved:
    """What autograd really packs, by storage."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes: dict[int, int] = {}
        own = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
        self._own, self._held = own, list[Tensor]()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._held.append(tensor)
        if storage._cdata not in self._own:
            self.bytes[storage._cdata] = storage.nbytes()
        return tensor


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention"])
def test_what_is_saved_is_what_autograd_packs(name: str) -> None:
    models = {
        "mlp": (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (3, 8)),
        "cnn": (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            (2, 3, 8, 8),
        ),
        "attention": (nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), (2, 5, 16)),
    }
    model, shape = models[name]
    x = torch.randn(shape, requires_grad=True)
    really = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(really.pack, lambda tensor: tensor):
        model(x).sum()
    assert node_table(model, x).total().fwd_saved == sum(really.bytes.values())


def test_an_attention_of_one_tensor_saves_it_once() -> None:
    def program() -> None:
        x = torch.randn(1, 2, 8, 4, requires_grad=True) * 2
        functional.scaled_dot_product_attention(x, x, x).sum().backward()

    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    row = row_of(node_table(program), name)
    assert row.fwd_in == row.fwd_in_saved == 1 * 2 * 8 * 4 * 4
    assert row.fwd_saved == row.fwd_in + row.fwd_out  # its output, and the sums of its rows
    assert row.fwd_flops == 2 * 2 * (1 * 2 * 8 * 8 * 4)
    assert row.bwd_flops == 5 * 2 * (1 * 2 * 8 * 8 * 4)


def test_parameters_are_no_activations_and_views_belong_to_their_base() -> None:
    def program(weight: Tensor) -> None:
        x = torch.randn(4, 6, requires_grad=True).exp()
        functional.linear(x[:2].view(2, 6), weight).sum().backward()

    row = row_of(node_table(program, nn.Parameter(torch.randn(5, 6))), "aten::mm")
    assert row.fwd_in == 4 * 6 * 4  # the whole of x, and not the weight
    row = row_of(node_table(nn.Linear(6, 5, bias=False), torch.randn(2, 6)), "aten::mm")
    assert (row.fwd_in, row.fwd_saved, row.fwd_out, row.bwd_out) == (48, 48, 40, 120)


def test_an_output_stays_because_a_user_saves_it() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 2), nn.ReLU(inplace=True))
    table = node_table(model, torch.randn(3, 4))
    first, last = [row for row in table if row.operator == "aten::addmm"]
    sigmoid, relu = row_of(table, "aten::sigmoid"), row_of(table, "aten::relu_")
    assert first.fwd_out == 96
    assert first.fwd_out_saved == 0  # sigmoid saves what it returns, not what it reads
    assert sigmoid.fwd_out_saved == sigmoid.fwd_out == 96
    assert relu.fwd_out == 0
    assert relu.fwd_saved == last.fwd_out_saved == last.fwd_out == 24  # in place, in its input


def test_a_checkpoint_computes_again_in_rows_of_its_own() -> None:
    model = Checkpointed(inner=nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
    table = node_table(model, torch.randn(3, 4, requires_grad=True))
    once, again = [row for row in table if row.operator == "aten::addmm"]
    assert (once.phase, again.phase) == ("forward", "backward")
    assert again.fwd_flops == once.fwd_flops > 0
    assert (once.bwd_flops, again.bwd_flops) == (2 * once.fwd_flops, 0)
    assert once.fwd_saved == once.fwd_in == 48  # and not what is computed again


def test_a_node_without_operator_has_a_row_of_its_own() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad * 2

    def program() -> None:
        x = torch.randn(4, 6, requires_grad=True)
        Double.apply(x[:, :2]).exp().sum().backward()

    table = node_table(program)
    assert row_of(table, "DoubleBackward").bwd_out == 4 * 2 * 4
    assert row_of(table, "SliceBackward0").bwd_out == 4 * 6 * 4


def test_operations_are_those_of_the_counter_of_torch(device: str) -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    model = nn.Sequential(*layers)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    total = node_table(model, x, device=device).total()
    assert total.fwd_flops + total.bwd_flops == counter.get_total_flops()


_SINCE_2_15 = ("flash_attention_for_cpu", "flash_attention_for_cpu_backward")


def test_every_formula_is_of_an_operator_that_torch_has_none_for() -> None:
    from torch.utils.flop_counter import flop_registry

    load()
    ours = [name for name, record in records().items() if record.flops]
    assert len(ours) > 20
    for name in ours:
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        has_one = packet in flop_registry
        assert not has_one or (TORCH_VERSION >= (2, 15) and name.endswith(_SINCE_2_15)), name


@pytest.mark.parametrize(
    ("program", "operations"),
    [
        (lambda a, b, c: torch.mv(a, c), 2 * 12),
        (lambda a, b, c: torch.addmv(torch.zeros(3), a, c), 2 * 12),
        (lambda a, b, c: torch.dot(c, c), 2 * 4),
        (lambda a, b, c: torch.addr(torch.zeros(4, 4), c, c), 2 * 16),
        (lambda a, b, c: torch.addbmm(torch.zeros(3, 3), a[None], b[None]), 2 * 36),
        (lambda a, b, c: torch.zeros(3, 3).addmm_(a, b), 2 * 36),
        (lambda a, b, c: torch.cdist(a, a[:2], compute_mode="donot_use_mm_for_euclid_dist"), 72),
        (lambda a, b, c: torch.fft.fft(torch.complex(c, c)), 5 * 4 * 2),
        (lambda a, b, c: torch.fft.rfft(c), 5 * 4 * 2 / 2),
        (lambda a, b, c: functional.bilinear(a, a, torch.ones(5, 4, 4)), 3 * (3 * 5 * 16)),
        (lambda a, b, c: nn.LSTM(4, 6)(a[None]), 2 * 3 * (24 * 4 + 24 * 6)),
        (
            lambda a, b, c: torch.ops.aten.slow_conv_transpose2d(
                torch.ones(1, 2, 4, 4), torch.ones(2, 3, 3, 3), [3, 3]
            ),
            2 * 16 * 2 * 3 * 9,
        ),
        (lambda a, b, c: torch.linalg.cholesky(torch.eye(4)), 64 // 3),
        (lambda a, b, c: torch.linalg.solve(torch.eye(4), c), 2 * 64 // 3 + 2 * 16),
        (lambda a, b, c: torch.linalg.inv(torch.eye(4)), 2 * 64),
        (lambda a, b, c: torch.linalg.qr(torch.eye(4)), 4 * 64 // 3 + 4 * 64 // 3),
        (lambda a, b, c: torch.linalg.det(torch.eye(4)), 2 * 64 // 3),
        (
            lambda a, b, c: torch.linalg.solve_triangular(torch.eye(4), c[:, None], upper=True),
            4 * 4,
        ),
        (
            lambda a, b, c: functional.grouped_mm(
                torch.ones(4, 8).bfloat16(),
                torch.ones(2, 8, 16).bfloat16(),
                offs=torch.tensor([2, 4], dtype=torch.int32),
            ),
            2 * 4 * 8 * 16,
        ),
    ],
)
def test_formulas(program: Callable[..., object], operations: int) -> None:
    a, b, c = torch.randn(3, 4), torch.randn(4, 3), torch.randn(4)
    with torch.no_grad():
        table = node_table(lambda: program(a, b, c))
    assert table.total().fwd_flops == operations


def test_bytes_that_are_moved() -> None:
    def program() -> None:
        x = torch.empty(8)
        x.fill_(1)
        x.expand(3, 8) + torch.ones(3, 8)
        x.add_(1)

    table = node_table(program)
    moved = {row.operator: row.fwd_moved for row in table if row.calls}
    assert (moved["aten::empty.memory_format"], moved["aten::fill_.Scalar"]) == (0, 32)
    assert (moved["aten::add.Tensor"], moved["aten::add_.Tensor"]) == (32 + 96 + 96, 32 + 32)


def test_repeated_layers_fold_and_modules_add_up() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    table = node_table(model, torch.randn(2, 8))
    folded = {(row.module, row.operator): row for row in table.folded()}
    row = folded["Sequential.*.*", "aten::addmm"]
    assert (row.calls, row.fwd_out) == (3, 3 * 64)
    assert sum(row.fwd_flops for row in table.by_module()) == table.total().fwd_flops == 3 * 256
    assert {row.operator for row in table.by_operator() if row.calls == 3} >= {"aten::addmm"}


def test_export_and_text() -> None:
    table = node_table(nn.Linear(4, 2), torch.randn(3, 4))
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert tuple(lines[0]) == COLUMNS
    assert [int(line["fwd_out"]) for line in lines if line["operator"] == "aten::addmm"] == [24]
    assert "aten::addmm" in table.table()
    assert len(table.table(1).splitlines()) == 2 + 1 + 1


def test_a_graph_is_filled_in_node_by_node() -> None:
    class Model(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.linear(x)) * 2

    model, x = Model(linear=nn.Linear(4, 8)), torch.randn(3, 4)
    graph = fx.symbolic_trace(model)
    code = graph.code
    table = node_table(graph, x)
    assert graph.code == code
    assert table.peaks() == node_table(model, x).peaks()
    meta = {node.name: node.meta for node in graph.graph.nodes}
    assert meta["linear"]["fwd_out"] == meta["sigmoid"]["fwd_out"] == 96
    assert meta["linear"]["bwd_flops"] == 2 * 3 * 4 * 8  # of the weight: x needs no gradient
    assert meta["linear"]["save_fwd_in"]
    assert not meta["sigmoid"]["save_fwd_in"]
    assert meta["sigmoid"]["memory"].fwd_saved == 96
    assert meta["x"]["fwd_out"] == 0


def test_a_profile_that_was_pickled_has_its_table() -> None:
    profile = trace(nn.Linear(4, 2), torch.randn(3, 4))
    again = pickle.loads(pickle.dumps(profile))
    assert again.node_table().to_csv() == profile.node_table().to_csv()


def test_a_measurement_has_no_operators() -> None:
    with pytest.raises(UsageError, match="trace"):
        measure(nn.Linear(4, 2), torch.randn(3, 4)).node_table()


def test_products_of_sparse_matrices_are_operators_with_operations(device: str) -> None:
    def step() -> None:
        sparse = torch.eye(64, device=device).to_sparse().requires_grad_()
        dense = torch.ones(64, 16, device=device, requires_grad=True)
        torch.sparse.mm(sparse, dense).sum().backward()
        compressed = torch.eye(64, device=device).to_sparse_csr()
        with torch.no_grad():
            compressed @ dense
            torch.sparse.sampled_addmm(compressed, dense, dense.t())

    profile = trace(step, device=device)
    table = profile.node_table()
    product = 2 * 64 * 16  # each of 64 entries by a row
    rows = [row for row in table.rows if "addmm" in row.operator]
    assert [row.fwd_flops for row in rows] == [product, product, product]
    # Each factor's gradient: one sparse, and one dense before it is masked.
    assert rows[0].bwd_flops == product + 64 * product
    assert table.peaks()["peak"] == profile.peak


def test_results_are_printed_as_their_tables() -> None:
    profile = trace(torch.nn.Linear(4, 4), torch.randn(2, 4))
    for shown in (profile, profile.node_table(), profile.plan()):
        assert str(shown) == shown.table()
        assert "&" not in shown.table()
        assert shown._repr_html_() == f"<pre>{shown.table()}</pre>"
