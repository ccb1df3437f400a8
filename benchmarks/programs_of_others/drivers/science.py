"""Differential equations, Gaussian processes, attributions and attacks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.programs_of_others.drivers.trainers import network
from benchmarks.programs_of_others.drivers.vision import device


def differential_equation() -> Callable[[], None]:
    """Fit an ODE with an adaptive solver, whose step size depends on values."""
    from torchdiffeq import odeint_adjoint as odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.net(y**3)

    def program() -> None:
        field = Field().to(device())
        optimizer = torch.optim.RMSprop(field.parameters(), lr=1e-3)
        start = torch.tensor([[2.0, 0.0]], device=device())
        t = torch.linspace(0.0, 1.0, 5, device=device())
        for _ in range(2):
            optimizer.zero_grad()
            loss = odeint(field, start, t, method="dopri5").abs().mean()
            loss.backward()
            optimizer.step()
        print(f"Total Loss {loss.item():.6f}")

    return program


def gaussian_process() -> Callable[[], None]:
    """Train an exact Gaussian process and predict, as GPyTorch's first tutorial does."""
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Any, y: Any, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    def program() -> None:
        x = torch.linspace(0, 1, 30, device=device())
        y = torch.sin(x * 6.28) + torch.randn(x.size(), device=device()) * 0.2
        likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device())
        model = Model(x, y, likelihood).to(device())
        model.train()
        likelihood.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        for _ in range(2):
            optimizer.zero_grad()
            loss = -objective(model(x), y)
            loss.backward()
            scale = model.covar_module.base_kernel.lengthscale.item()
            print("%.3f %.3f" % (loss.item(), scale))  # noqa: UP031
            optimizer.step()
        model.eval()
        likelihood.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            lower, upper = likelihood(
                model(torch.linspace(0, 1, 7, device=device()))
            ).confidence_region()
        print(lower.tolist(), upper.tolist())

    return program


def attributions() -> Callable[[], None]:
    """Attribute a prediction with Captum's integrated gradients and occlusion."""
    from captum.attr import IntegratedGradients, NoiseTunnel, Occlusion

    def program() -> None:
        model = network().to(device()).eval()
        picture = torch.rand(2, 1, 16, 16, device=device())
        target = model(picture).argmax(1)
        integrated = IntegratedGradients(model)
        found, delta = integrated.attribute(
            picture, target=target, return_convergence_delta=True, n_steps=8
        )
        print(found.sum().item(), delta.abs().max())
        NoiseTunnel(integrated).attribute(picture, target=target, nt_samples=2, n_steps=4)
        Occlusion(model).attribute(
            picture, target=target, sliding_window_shapes=(1, 8, 8), strides=(1, 8, 8)
        )

    return program


def attack() -> Callable[[], None]:
    """Attack a classifier with torchattacks' PGD and measure its accuracy."""
    import torchattacks

    def program() -> None:
        model = network().to(device()).eval()
        images = torch.rand(4, 1, 16, 16, device=device())
        labels = torch.randint(0, 4, (4,), device=device())
        for make in (torchattacks.PGD, torchattacks.FGSM, torchattacks.DeepFool):
            adversarial = make(model)(images, labels)
            print((model(adversarial).argmax(1) == labels).float().mean().item())

    return program
