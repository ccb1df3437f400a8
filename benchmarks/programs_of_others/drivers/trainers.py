"""Lightning, Accelerate, Ignite, fastai, torchmetrics, stable-baselines3, PyG and others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.programs_of_others.drivers.vision import device


def digits(count: int = 48) -> TensorDataset:
    """Return pictures of one channel with their classes."""
    return TensorDataset(torch.rand(count, 1, 16, 16), torch.arange(count) % 4)


def network() -> nn.Module:
    """Return a small classifier of these pictures."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 14 * 14, 4),
    )


def lightning_training(precision: str) -> Callable[[], None]:
    """Fit a LightningModule with validation, logging and a metric."""
    import lightning as L
    import torchmetrics

    class Classifier(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.accuracy(self.model(x), y)
            self.log("val_acc", self.accuracy, on_epoch=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def program() -> None:
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="auto",
            devices=1,
            logger=False,
            precision=precision,
            enable_checkpointing=precision == "32",
            gradient_clip_val=1.0,
            log_every_n_steps=1,
        )
        trainer.fit(Classifier(), DataLoader(digits(), 16), DataLoader(digits(), 16))
        print(trainer.callback_metrics)

    return program


def lightning_fabric() -> Callable[[], None]:
    """Train with Fabric, as its README shows."""
    import lightning as L

    def program() -> None:
        fabric = L.Fabric(accelerator="auto", devices=1, precision="32-true")
        fabric.launch()
        model = network()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for x, y in fabric.setup_dataloaders(DataLoader(digits(), 16)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            fabric.print(loss.item())

    return program


def accelerate_training(precision: str) -> Callable[[], None]:
    """Train with Accelerate: accumulation, clipping, gathered metrics."""
    from accelerate import Accelerator

    def program() -> None:
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(digits(), 8, shuffle=True)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        correct = 0
        for x, y in loader:
            with accelerator.accumulate(model):
                output = model(x)
                loss = F.cross_entropy(output, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            predicted, labels = accelerator.gather_for_metrics((output.argmax(1), y))
            correct += (predicted == labels).sum().item()
        accelerator.print(f"{100 * correct / 48:.2f}")
        accelerator.save_state("checkpoint")
        accelerator.load_state("checkpoint")

    return program


def accelerate_device_map() -> Callable[[], None]:
    """Dispatch a model over the devices that there are, and run it."""
    from accelerate import dispatch_model, infer_auto_device_map

    def program() -> None:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        if torch.cuda.is_available():
            model = dispatch_model(model, infer_auto_device_map(model))
        print(model(torch.randn(2, 64).to(device())).shape)

    return program


def ignite_training() -> Callable[[], None]:
    """Train with Ignite's engines, metrics and handlers, as its quickstart does."""
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EarlyStopping, ModelCheckpoint
    from ignite.metrics import Accuracy, ConfusionMatrix, Loss, RunningAverage

    def program() -> None:
        model = network().to(device())
        optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
        criterion = nn.CrossEntropyLoss()
        trainer = create_supervised_trainer(model, optimizer, criterion, device())
        RunningAverage(output_transform=lambda x: x).attach(trainer, "loss")
        metrics = {"accuracy": Accuracy(), "loss": Loss(criterion), "cm": ConfusionMatrix(4)}
        evaluator = create_supervised_evaluator(model, metrics=metrics, device=device())
        loader = DataLoader(digits(), 16)

        @trainer.on(Events.EPOCH_COMPLETED)
        def log(engine: Any) -> None:
            evaluator.run(loader)
            found = evaluator.state.metrics
            print(f"Avg accuracy: {found['accuracy']:.2f} Avg loss: {found['loss']:.2f}")

        stopping = EarlyStopping(1, lambda engine: -engine.state.metrics["loss"], trainer)
        evaluator.add_event_handler(Events.COMPLETED, stopping)
        saver = ModelCheckpoint(
            "models",
            "best",
            n_saved=1,
            require_empty=False,
            score_function=lambda engine: engine.state.metrics["accuracy"],
        )
        evaluator.add_event_handler(Events.COMPLETED, saver, {"model": model})
        trainer.run(loader, max_epochs=2)

    return program


def fastai_vision() -> Callable[[], None]:
    """Fit one cycle with fastai's Learner on pictures."""
    from fastai.callback import schedule  # noqa: F401
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner
    from fastai.metrics import accuracy

    def program() -> None:
        loaders = DataLoaders.from_dsets(digits(), digits(), bs=16, device=device())
        learner = Learner(loaders, network(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
        with learner.no_bar(), learner.no_logging():
            learner.fit_one_cycle(1, 1e-3)
        print(learner.recorder.values)

    return program


def fastai_tabular() -> Callable[[], None]:
    """Fit fastai's tabular learner on a small table."""
    import numpy
    import pandas
    from fastai.tabular.all import (
        Categorify,
        FillMissing,
        Normalize,
        TabularDataLoaders,
        accuracy,
        tabular_learner,
    )

    random = numpy.random.default_rng(0)
    table = pandas.DataFrame(
        {
            "age": random.normal(size=96),
            "job": random.choice(["a", "b", "c"], 96),
            "pay": random.choice(["low", "high"], 96),
        }
    )

    def program() -> None:
        loaders = TabularDataLoaders.from_df(
            table,
            procs=[Categorify, FillMissing, Normalize],
            cat_names=["job"],
            cont_names=["age"],
            y_names="pay",
            bs=16,
        )
        learner = tabular_learner(loaders, layers=[16, 8], metrics=accuracy)
        with learner.no_bar():
            learner.fit_one_cycle(1)

    return program


def torchmetrics_all(kind: str) -> Callable[[], None]:
    """Update and compute metrics on the device."""
    import torchmetrics
    from torchmetrics.detection import MeanAveragePrecision

    def program() -> None:
        if kind == "classification":
            metrics = torchmetrics.MetricCollection(
                [
                    torchmetrics.Accuracy(task="multiclass", num_classes=5),
                    torchmetrics.F1Score(task="multiclass", num_classes=5, average="macro"),
                    torchmetrics.AUROC(task="multiclass", num_classes=5),
                    torchmetrics.ConfusionMatrix(task="multiclass", num_classes=5),
                    torchmetrics.CalibrationError(task="multiclass", num_classes=5),
                ]
            ).to(device())
            for _ in range(2):
                scores = torch.randn(20, 5, device=device()).softmax(-1)
                print(metrics(scores, torch.randint(5, (20,), device=device())))
        elif kind == "detection":
            metric = MeanAveragePrecision(backend="faster_coco_eval").to(device())
            boxes = torch.tensor([[10.0, 20.0, 50.0, 60.0]], device=device())
            labels = torch.tensor([0], device=device())
            scores = torch.tensor([0.5], device=device())
            metric.update(
                [{"boxes": boxes + 1, "scores": scores, "labels": labels}],
                [{"boxes": boxes, "labels": labels}],
            )
            print(metric.compute()["map"])
        else:
            images = torch.rand(2, 3, 32, 32, device=device())
            for metric in (
                torchmetrics.image.StructuralSimilarityIndexMeasure(data_range=1.0),
                torchmetrics.image.PeakSignalNoiseRatio(data_range=1.0),
                torchmetrics.SpearmanCorrCoef(),
                torchmetrics.regression.R2Score(),
            ):
                metric = metric.to(device())
                a = images if "image" in type(metric).__module__ else images.flatten()
                print(type(metric).__name__, metric(a, a * 0.9))

    return program


def baselines(algorithm: str, environment: str) -> Callable[[], None]:
    """Learn and predict with stable-baselines3."""
    import stable_baselines3

    options: dict[str, Any] = {
        "PPO": {"n_steps": 32, "batch_size": 16, "n_epochs": 1},
        "A2C": {"n_steps": 8},
        "DQN": {"learning_starts": 16, "train_freq": 8, "batch_size": 8},
        "SAC": {"learning_starts": 16, "train_freq": 8, "batch_size": 8},
        "TD3": {"learning_starts": 16, "train_freq": 8, "batch_size": 8},
        "DDPG": {"learning_starts": 16, "train_freq": 8, "batch_size": 8},
    }[algorithm]

    def program() -> None:
        model = getattr(stable_baselines3, algorithm)(
            "MlpPolicy", environment, seed=0, policy_kwargs={"net_arch": [16]}, **options
        )
        model.learn(total_timesteps=64)
        observations = model.get_env().reset()
        action, _ = model.predict(observations, deterministic=True)
        model.get_env().step(action)

    return program


def graph(name: str) -> Callable[[], None]:
    """Train a graph network of PyG on a random graph."""
    from torch_geometric import nn as gnn
    from torch_geometric.data import Batch, Data
    from torch_geometric.utils import negative_sampling, to_undirected

    def one() -> Data:
        edges = to_undirected(torch.randint(0, 20, (2, 60)))
        return Data(x=torch.randn(20, 8), edge_index=edges, y=torch.randint(0, 3, (20,)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            make = {
                "gcn": gnn.GCNConv,
                "gat": gnn.GATConv,
                "sage": gnn.SAGEConv,
                "transformer": gnn.TransformerConv,
                "topk": gnn.GraphConv,
                "pna": gnn.GCNConv,
                "link": gnn.GCNConv,
            }[name]
            self.first, self.second = make(8, 16), make(16, 16)
            self.pool = gnn.TopKPooling(16, ratio=0.5) if name == "topk" else None
            self.head = nn.Linear(16, 3)

        def forward(self, data: Any) -> torch.Tensor:
            x = F.dropout(self.first(data.x, data.edge_index).relu(), training=self.training)
            if self.pool is not None:
                x, edges, _, batch, _, _ = self.pool(x, data.edge_index, None, data.batch)
                return self.head(gnn.global_mean_pool(self.second(x, edges), batch))
            return self.second(x, data.edge_index)

    def program() -> None:
        data = Batch.from_data_list([one(), one()]).to(device())
        model = Net().to(device())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        mask = torch.rand(40, device=device()) < 0.5
        for _ in range(2):
            optimizer.zero_grad()
            out = model(data)
            if name == "topk":
                loss = F.cross_entropy(out, torch.tensor([0, 1], device=device()))
            elif name == "link":
                negative = negative_sampling(data.edge_index, num_nodes=40)
                pairs = torch.cat([data.edge_index, negative], 1)
                score = (out[pairs[0]] * out[pairs[1]]).sum(-1)
                truth = torch.zeros_like(score)
                truth[: data.edge_index.size(1)] = 1.0
                loss = F.binary_cross_entropy_with_logits(score, truth)
            else:
                out = model.head(out)
                loss = F.cross_entropy(out[mask], data.y[mask])
            loss.backward()
            optimizer.step()
        print(f"Loss: {float(loss):.4f}")
        if name in ("gcn", "gat"):
            predicted = out.argmax(dim=-1)
            print(int((predicted[mask] == data.y[mask]).sum()) / int(mask.sum()))

    return program


def free_of_schedules(name: str) -> Callable[[], None]:
    """Train with an optimizer of another library."""
    import bitsandbytes
    import schedulefree
    import torch_optimizer

    def program() -> None:
        model = network().to(device())
        make = {
            "schedulefree": lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-3),
            "radam": lambda p: torch_optimizer.RAdam(p),
            "lamb": lambda p: torch_optimizer.Lamb(p),
            "shampoo": lambda p: torch_optimizer.Shampoo(p),
            "adam8bit": lambda p: bitsandbytes.optim.Adam8bit(p, lr=1e-3),
            "paged-adamw": lambda p: bitsandbytes.optim.PagedAdamW8bit(p, lr=1e-3),
        }[name]
        optimizer = make(model.parameters())
        if hasattr(optimizer, "train"):
            optimizer.train()
        for x, y in DataLoader(digits(), 16):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device())), y.to(device()))
            loss.backward()
            optimizer.step()
        print(loss.item())

    return program
