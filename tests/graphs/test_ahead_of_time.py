"""Graphs of AOTAutograd: what runs of them is what the real allocator counts, and what is read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops import associative_scan
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import MemoryProfile, graph_profile, measure, trace
from pytest_torchmem.errors import UsageError
from pytest_torchmem.profile.timeline import Kind
from pytest_torchmem.tracing.ahead_of_time import run_ahead_of_time
from tests.modules import Parts


class Attention(Parts):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        parts = self.inner(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        return {"out": functional.scaled_dot_product_attention(query, key, value).sum((1, 3))}


class Views(Parts):
    """Views, a tuple of which one part is read, and a result that nobody reads."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two, _ = self.linear(x).sigmoid().chunk(3, -1)
        return one.transpose(0, 1) * 2, torch.topk(two.contiguous(), 3).values


class Idioms(Parts):
    """A view of what is computed twice, a loss on a large storage, and data of the program."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x.flatten()]).view_as(x)
        x = checkpoint(self.inner, x, use_reentrant=False)
        for row in x.unbind():
            x = x * self.decay.exp() + row
        return functional.smooth_l1_loss(x, x.exp()) * x


class Several(nn.Module):
    """Operators that call others, a wrapper of ``vmap``, constants, a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.cell = nn.EmbeddingBag(4, 16), nn.GRUCell(16, 16)
        self.table = torch.ones(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cell(self.bag((x > 0).long()), x * self.table.to(x.device))
        x = torch.vmap(lambda row: (row * torch.ones(16, device=row.device).cumsum(0)).exp())(x)
        return x * torch.tensor(2.0, device=x.device)


class Causal(nn.Module):
    """Attention that no fused kernel takes: C++ makes the mask."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            x, x[:, :2], x[:, :2], is_causal=True, enable_gqa=True
        )


def mlp() -> nn.Module:
    layers = (nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8))
    return nn.Sequential(*layers)


def statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 16)),
    "statistics": (statistics, (6, 16)),
    "attention": (lambda: Attention(inner=nn.Linear(32, 96)), (2, 24, 32)),
    "views": (lambda: Views(linear=nn.Linear(16, 48)), (6, 16)),
    "idioms": (
        lambda: Idioms(inner=nn.Linear(16, 16), decay=nn.Parameter(torch.ones(16))),
        (6, 16),
    ),
    "several": (Several, (6, 16)),
}


def total(output: Any) -> Tensor:
    parts = output.values() if isinstance(output, dict) else output
    return sum(part.sum() for part in ((parts,) if isinstance(parts, Tensor) else parts))  # type: ignore


@pytest.mark.parametrize("name", MODELS)
def test_the_real_allocator_counts_the_same(name: str) -> None:
    build, shape = MODELS[name]

    def program() -> object:
        torch.manual_seed(0)
        model, x = build(), torch.randn(shape, requires_grad=True)
        run_ahead_of_time(model)
        total(model(x)).backward()  # makes the graphs
        model.zero_grad()
        x.grad = None
        total(model(x)).backward()
        return model, x

    traced, measured = trace(program, host="here"), measure(program)
    # Making graphs runs backwards of fake tensors, so that a measurement finds other phases.
    assert (traced.peak, traced.end) == (measured.peak, measured.end)


def fresh(node: fx.Node, known: dict[int, Tensor]) -> Any:
    """Return a tensor as a graph is given one; those that share a storage are given one that do."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage()
    on = value.device
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=on)
    memory = known.setdefault(storage._cdata, memory)
    return torch.empty(0, dtype=value.dtype, device=on).set_(
        memory.untyped_storage(), value.storage_offset(), value.size(), value.stride()
    )


def given(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def run(forward, backward, device) -> object:
    """Run both graphs, as the program holds what they are given and return."""
    with torch.no_grad(), torch.device(device):
        known: dict[int, Tensor] = {}
        primals = [fresh(node, known) for node in given(forward)]
        known.clear()
        outputs = list(fx.Interpreter(forward).boxed_run(list(primals)))
        tangents = [node for node in given(backward) if node.name.startswith("tangents")]
        first = len(outputs) - (len(given(backward)) - len(tangents))
        inputs = outputs[first:] + [fresh(node, {}) for node in tangents]
        del outputs[first:]
        return primals, outputs, fx.Interpreter(backward).boxed_run(inputs)


def live_tensors(profile: MemoryProfile) -> list[int]:
    """Return the bytes of tensors alone after each event."""
    live = [0]
    for event in profile.timeline.events:
        allocation = profile.timeline.allocations[abs(event) - 1]
        nbytes = 0 if allocation.kind is Kind.WORKSPACE else allocation.nbytes
        live.append(live[-1] + (nbytes if event > 0 else -nbytes))
    return live


@pytest.mark.parametrize("name", MODELS)
def test_graphs_have_the_memory_that_running_them_takes(name: str, device: Any) -> None:
    build, shape = MODELS[name]
    profile = trace(build(), torch.randn(shape), loss_fn=total, mode="aot", device=device)
    assert profile.level == "aot"
    forward, backward = profile.graphs
    found = graph_profile(forward, backward)
    live = live_tensors(trace(run, forward, backward, device, device=device))
    assert (found.peak, found.end) == (max(live), live[-1])
    assert found.baseline <= found.retained <= found.forward_peak
    # The backward has a copy of the constant, which was made with its graph.
    constant = 4 if (name, device) == ("several", "cpu") else 0
    assert found.baseline == profile.baseline + constant or name == "statistics"


def test_what_an_operator_of_higher_order_holds_is_counted() -> None:
    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = associative_scan(lambda one, two: one * two, x.exp(), dim=1)
            assert isinstance(found, Tensor)
            return found

    x = torch.randn(4, 33, 8)
    profile = trace(Scan(), x, mode="aot", device="cuda", backward=False)
    [graph] = profile.graphs
    assert any("scan" in str(node.target) for node in graph.graph.nodes)
    found = graph_profile(graph)
    assert (found.peak, found.end) == (profile.peak, 2 * x.nbytes + x.nbytes // 33)


def test_new_values_of_inputs_are_gone_after_the_forward() -> None:
    profile = trace(statistics(), torch.randn(6, 16), mode="aot")
    kept, copied = (graph_profile(*profile.graphs, mutated=count) for count in (0, 3))
    assert copied.end == kept.end - 2 * 32 * 4 - 8
    assert graph_profile(profile.graphs[0]).backward_peak is None


def test_a_graph_for_a_gpu_has_its_operators() -> None:
    model, x = nn.Sequential(Attention(inner=nn.Linear(32, 96))), torch.randn(2, 24, 32)
    names: dict[Any, str] = {"cpu": "flash_attention_for_cpu", "cuda": "efficient_attention"}
    for device, name in names.items():
        forward, _ = trace(model, x, mode="aot", loss_fn=total, device=device, gpu="t4").graphs
        assert any(name in str(node.target) for node in forward.graph.nodes)
    causal = trace(Causal(), x := torch.randn(2, 4, 6, 8, requires_grad=True), device="cuda")
    assert trace(Causal(), x, mode="aot", device="cuda").peak == causal.peak
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    forward, _ = trace(dropout, torch.randn(2, 4), mode="aot", device="cuda").graphs
    assert any("native_dropout" in str(node.target) for node in forward.graph.nodes)


def test_the_partitioner_saves_less_than_autograd() -> None:
    class Pointwise(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.weight).sin().cos().exp() + 1).tanh()

    model, x = Pointwise(weight=nn.Parameter(torch.ones(64))), torch.randn(32, 64)
    eager, ahead = trace(model, x), trace(model, x, mode="aot")
    assert ahead.retained < eager.retained
    assert eager.level == "eager"


def test_the_program_is_as_it_was_and_the_nodes_have_rows() -> None:
    model, x = mlp(), torch.randn(6, 16)
    profile = trace(model, x, mode="aot", optimizer=torch.optim.AdamW, steps=2)
    assert "forward" not in model.__dict__
    assert not torch.compiler.is_compiling()
    assert len(profile.graphs) == 2
    assert {"addmm", "gelu", "native_layer_norm"} <= {row.node for row in profile.node_table()}
    with pytest.raises(UsageError, match="'eager', 'aot', 'inductor'"):
        trace(model, x, mode="compiled")  # type: ignore[arg-type]


def test_copies_to_the_host_are_on_the_host() -> None:
    class Moves(Parts):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y.sum() + (y.cpu() * 2).sum().cuda() + y.new_tensor([1.0]).sum()

    given = Moves(linear=nn.Linear(64, 64)), torch.randn(256, 64)
    graphs = trace(*given, device="cuda", mode="aot")
    assert graphs.peak == trace(*given, device="cuda", mode="eager").peak

    def program() -> None:
        x = torch.randn(8, device="cuda", requires_grad=True)
        made = torch.ops.aten.full.default([8], 1.0, device="cpu")
        copied = torch.ops.aten._to_copy.default(x * 2, device="cpu")
        assert (made.device, copied.device) == (torch.device("cpu"),) * 2
        (copied * made).sum().backward()
        assert x.grad.device == torch.device("cuda", 0)

    trace(program, device="cuda")


def test_what_has_no_graph_is_refused() -> None:
    class Recurrent(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)[0]

    with pytest.raises(UsageError, match=r"test_ahead_of_time.py:\d+: AOTAutograd makes no graph"):
        trace(Recurrent(4, 4), torch.randn(2, 3, 4), mode="aot", device="cuda")

    class Decides(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(UsageError, match=r"time.py:\d+: .* decides by the values"):
        trace(Decides(4, 4), torch.ones(2, 4), mode="aot")
    with pytest.raises(UsageError, match=r"meta\['val'\]"):
        graph_profile(fx.symbolic_trace(nn.Linear(2, 2)))
    none: Any = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="GraphModule, not Linear"):
        graph_profile(none)
    with pytest.raises(UsageError, match="no output node"):
        graph_profile(fx.GraphModule(nn.Module(), fx.Graph()))
