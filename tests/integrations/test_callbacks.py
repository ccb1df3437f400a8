"""Callbacks say what a training was traced to take, beside what it took."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem.integrations.training import REAL, TRACED, RunPeaks, sentence


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def test_transformers_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from pytest_torchmem.integrations.transformers import MemoryCallback

    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100, bos_token_id=1)
    data = [{name: torch.arange(16) for name in ("input_ids", "labels")} for _ in range(10)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to=[]
    )
    callback = MemoryCallback()
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert callback.figures[TRACED] == callback.figures[REAL] > 100_000
    assert callback.figures.items() <= trainer.state.log_history[-1].items()
    assert sentence(callback.figures) in capsys.readouterr().out
    assert not trainer.model._forward_pre_hooks


def test_lightning_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from pytest_torchmem.integrations.lightning import MemoryCallback

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def training_step(self, batch: Any, index: int) -> dict[str, torch.Tensor]:
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    callback, logger = MemoryCallback(), CSVLogger(tmp_path)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=[callback], log_every_n_steps=1
    )
    data = torch.utils.data.TensorDataset(torch.randn(40, 64), torch.arange(40) % 8)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, 16))
    assert callback.figures[TRACED] == callback.figures[REAL] > 100_000
    (written,) = Path(logger.log_dir).glob("metrics.csv")
    lines = written.read_text().splitlines()
    assert len(lines) == 1 + 3 + 1, "the traced step logged nothing"
    assert TRACED in lines[0]


class Loss(nn.Module):
    """The loss of a model, or, with ``broken``, none."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.model, self.broken = model(), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.broken:
            raise ValueError("no loss today")
        return self.model(x).sum()


def test_a_step_that_cannot_be_traced_is_a_warning() -> None:
    peaks = RunPeaks()
    assert peaks.compare(Loss(), None) == {}, "there was no batch"
    peaks.see(torch.zeros(2, 64))
    with pytest.warns(UserWarning, match="not traced: no loss today"):
        assert peaks.compare(Loss(broken=True), None) == {}
