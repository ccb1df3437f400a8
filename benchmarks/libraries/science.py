"""Graphs, volumes, operators, flows and processes: torch_geometric, monai, neuraloperator, …"""

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries.registry import Step, register

GRAPH_NETWORKS = ("GCN", "GraphSAGE", "GIN", "GAT", "EdgeCNN")


def _graph() -> tuple[Tensor, Tensor]:
    return torch.randn(50, 16), torch.randint(0, 50, (2, 200))


def _graph_network(name: str) -> Step:
    import torch_geometric.nn

    return Step(getattr(torch_geometric.nn, name)(16, 32, 2, dropout=0.1), _graph())


for _name in GRAPH_NETWORKS:
    register(f"torch_geometric/{_name}")(lambda name=_name: _graph_network(name))


@register("torch_geometric/PNA")
def _aggregated() -> Step:
    from torch_geometric.nn import PNA

    degrees = torch.tensor([1, 5, 20])
    model = PNA(16, 32, 2, aggregators=["mean", "max"], scalers=["identity"], deg=degrees)
    return Step(model, _graph())


@register("torch_geometric/TransformerConv")
def _graph_attention() -> Step:
    from torch_geometric.nn import TransformerConv

    return Step(TransformerConv(16, 8, heads=4), _graph())


def _volume(name: str, shape: tuple[int, ...], *args: Any, **options: Any) -> Step:
    import monai.networks.nets as nets

    return Step(
        getattr(nets, name)(*args, **options),
        (torch.randn(*shape),),
        loss_fn=lambda output: (output if isinstance(output, Tensor) else output[0]).sum(),
    )


_CUBE = (1, 1, 32, 32, 32)
_TRANSFORMER: dict[str, Any] = {"feature_size": 8, "hidden_size": 96, "mlp_dim": 192}


@register("monai/UNet")
def _unet() -> Step:
    return _volume("UNet", _CUBE, 3, 1, 2, (16, 32, 64), (2, 2), num_res_units=1)


@register("monai/SegResNet")
def _segresnet() -> Step:
    options = {"init_filters": 8, "in_channels": 1, "out_channels": 2}
    return _volume("SegResNet", _CUBE, spatial_dims=3, **options)


@register("monai/UNETR")
def _unetr() -> Step:
    options = {"in_channels": 1, "out_channels": 2, "num_heads": 4, **_TRANSFORMER}
    return _volume("UNETR", _CUBE, img_size=(32, 32, 32), **options)


@register("monai/SwinUNETR")
def _swin_unetr() -> Step:
    options = {"in_channels": 1, "out_channels": 2, "feature_size": 12}
    return _volume("SwinUNETR", (1, 1, 64, 64, 64), **options)


@register("monai/DynUNet")
def _dynunet() -> Step:
    return _volume("DynUNet", _CUBE, 3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2])


@register("monai/VNet")
def _vnet() -> Step:
    return _volume("VNet", _CUBE, 3, 1, 2)


@register("monai/AttentionUnet")
def _attention_unet() -> Step:
    return _volume("AttentionUnet", (2, 1, 64, 64), 2, 1, 2, (16, 32), (2,))


@register("neuraloperator/FNO")
def _fourier() -> Step:
    from neuralop.models import FNO

    model = FNO(n_modes=(8, 8), hidden_channels=16, in_channels=1, out_channels=1)
    return Step(model, (torch.randn(2, 1, 32, 32),))


@register("torchdiffeq/odeint")
def _equation() -> Step:
    from torchdiffeq import odeint

    class Derivative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

        def forward(self, time: Tensor, state: Tensor) -> Tensor:
            result: Tensor = self.net(state)
            return result

    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.derivative = Derivative()

        def forward(self, state: Tensor) -> Any:
            return odeint(self.derivative, state, torch.linspace(0, 1, 5), method="rk4")

    return Step(Solved(), (torch.randn(8, 4),))


@register("e3nn/FullyConnectedTensorProduct")
def _equivariant() -> Step:
    from e3nn import o3

    representation = "4x0e+4x1o"
    model = o3.FullyConnectedTensorProduct(representation, representation, representation)
    return Step(model, (torch.randn(10, 16), torch.randn(10, 16)))


class _Likelihood(nn.Module):
    """A flow, by the likelihood that it gives to what comes in."""

    def __init__(self, flow: nn.Module, conditioned: bool) -> None:
        super().__init__()
        self.flow = flow
        self.conditioned = conditioned

    def forward(self, x: Tensor, *context: Tensor) -> Any:
        flow: Any = self.flow
        told = flow(*context).log_prob(x) if self.conditioned else flow.log_prob(x)
        return -told.mean()


@register("zuko/NSF")
def _spline_flow() -> Step:
    import zuko

    flow = zuko.flows.NSF(3, 2, transforms=2, hidden_features=(32, 32))
    inputs = torch.randn(16, 3), torch.randn(16, 2)
    return Step(_Likelihood(flow, conditioned=True), inputs, loss_fn=lambda output: output)


@register("nflows/MaskedAutoregressiveFlow")
def _masked_flow() -> Step:
    from nflows.flows import MaskedAutoregressiveFlow

    flow = MaskedAutoregressiveFlow(4, 16, 2, 2)
    inputs = (torch.randn(16, 4),)
    return Step(_Likelihood(flow, conditioned=False), inputs, loss_fn=lambda output: output)


@register("gpytorch/ExactGP")
def _process() -> Step:
    import gpytorch

    x, y = torch.randn(300, 2), torch.randn(300)

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, points: Tensor) -> Any:
            mean, covariance = self.mean(points), self.kernel(points)
            return gpytorch.distributions.MultivariateNormal(mean, covariance)

    class Fitted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            self.process = Process(likelihood)
            self.loss = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.process)

        def forward(self, points: Tensor, values: Tensor) -> Any:
            return -self.loss(self.process(points), values)

    return Step(Fitted(), (x, y), loss_fn=lambda output: output)


@register("kornia/augmentation")
def _augmented() -> Step:
    import kornia.augmentation as augmentation

    model = nn.Sequential(
        augmentation.RandomHorizontalFlip(p=0.5),
        augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1, p=1.0),
        nn.Conv2d(3, 8, 3),
    )
    return Step(model, (torch.rand(8, 3, 32, 32),))
