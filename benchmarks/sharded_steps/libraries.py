"""Libraries that train on many GPUs, as their users call them, on two ranks of eight.

    python -m benchmarks.sharded_steps.libraries [NAME...]

Prints the peak of each rank, by kind. Each program is that of a launched process: it makes its
process group and wraps its model itself. A library that is not installed is named and left out.
"""

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pytest_torchmem import trace

WORLD, RANKS, WIDTH, VOCABULARY, TOKENS = 8, (0, 3), 256, 2048, 128
PROGRAMS: dict[str, Callable[[], None]] = {}


def register(program: Callable[[], None]) -> Callable[[], None]:
    """Add a program by its name."""
    PROGRAMS[program.__name__] = program
    return program


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Tokens to train a language model on."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(index, index + TOKENS) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def llama() -> Any:
    """Return a small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config)


def train_with_trainer(**arguments: Any) -> None:
    """Run two steps of ``transformers.Trainer``."""
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as directory:
        options = TrainingArguments(
            directory,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            bf16=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        )
        Trainer(llama(), options, train_dataset=Sentences()).train()


@register
def trainer() -> None:
    """``transformers.Trainer``, which wraps the model in ``DistributedDataParallel``."""
    train_with_trainer()


@register
def trainer_sharded() -> None:
    """``transformers.Trainer`` with FSDP2."""
    wrapped = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    train_with_trainer(fsdp="full_shard auto_wrap", fsdp_config=wrapped)


def tensor_parallel(directory: str) -> None:
    """``from_pretrained(tp_plan="auto")``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, tp_plan="auto", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(VOCABULARY, (2, TOKENS), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()


@register
def transformers_tensor_parallel() -> None:
    """A checkpoint that was saved before, and is read by all ranks."""
    tensor_parallel(os.environ["CHECKPOINT"])


def train_with_accelerate(**arguments: Any) -> None:
    """Run two steps as accelerate's documentation writes them."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, **arguments)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(Sentences(), batch_size=2)
    )
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach())
        if number == 3:
            break
    accelerator.wait_for_everyone()


@register
def accelerate() -> None:
    """``Accelerator``, which wraps the model in ``DistributedDataParallel``."""
    train_with_accelerate()


@register
def accelerate_sharded() -> None:
    """``FullyShardedDataParallelPlugin`` of version 2."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        activation_checkpointing=True,
    )
    train_with_accelerate(fsdp_plugin=plugin)


def fit(strategy: Any, precision: str, shard: bool = False) -> None:
    """Run two steps of ``lightning.Trainer``."""
    import lightning
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            self.net = nn.Sequential(*layers)

        def configure_model(self) -> None:
            if shard and not hasattr(self, "sharded"):
                mesh, self.sharded = self.device_mesh["data_parallel"], True
                fully_shard(self.net[0], mesh=mesh)
                fully_shard(self.net[2], mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    loader = DataLoader(TensorDataset(torch.randn(256, WIDTH)), batch_size=4)
    lightning.Trainer(
        max_steps=2,
        accelerator="cuda",
        devices=WORLD,
        strategy=strategy,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), loader)


@register
def lightning_ddp() -> None:
    """``strategy="ddp"``."""
    fit("ddp", "bf16-mixed")


@register
def lightning_sharded() -> None:
    """``ModelParallelStrategy``, with ``fully_shard`` in ``configure_model``."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    fit(ModelParallelStrategy(data_parallel_size=WORLD, tensor_parallel_size=1), "bf16-true", True)


@register
def torchtune() -> None:
    """``shard_model`` and ``load_from_full_model_state_dict``; full_finetune_distributed.py."""
    from torchtune import training
    from torchtune.models.llama3_1 import llama3_1
    from torchtune.modules import TransformerSelfAttentionLayer

    dist.init_process_group("cuda:nccl,cpu:gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    make = partial(
        llama3_1,
        vocab_size=VOCABULARY,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
        embed_dim=WIDTH,
        max_seq_len=TOKENS,
        intermediate_dim=4 * WIDTH,
    )
    with training.set_default_dtype(torch.bfloat16), torch.device("meta"):
        model = make()
    training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    training.shard_model(
        model,
        [partial(training.get_shard_conditions, names_to_match=None)],
        cpu_offload=False,
        reshard_after_forward=True,
    )
    with training.set_default_dtype(torch.bfloat16), device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    with training.set_default_dtype(torch.bfloat16):
        full = make().state_dict()
    training.load_from_full_model_state_dict(model, full, device, strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (2, TOKENS), device=device)
    logits = model(tokens)
    functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
    training.scale_grads(model, torch.tensor(1.0 / WORLD))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@register
def torchtitan() -> None:
    """``parallelize_llama`` of the smallest Llama 3, sharded over 4 and split over 2."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3 import model_registry

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    backend = "partial_dtensor"
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=WORLD // 2,
        cp=1,
        tp=2,
        pp=1,
        ep=1,
        world_size=WORLD,
        spmd_backend=backend,
    )
    spec = model_registry("debugmodel", attn_backend="varlen")
    with torch.device("meta"):
        model = spec.model.build()
    spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=TrainingConfig(),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, spmd_backend=backend),
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=device)
    model.init_states(buffer_device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(2048, (2, TOKENS), device=device)
    positions = torch.arange(TOKENS, device=device).expand(2, -1)
    logits = model(tokens, positions, model.get_attention_masks(positions))
    functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def main() -> None:
    """Trace the programs, and print what they took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    warnings.simplefilter("ignore")
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CHECKPOINT"] = directory
        for name in parser.parse_args().names or PROGRAMS:
            try:
                if name == "transformers_tensor_parallel":
                    llama().save_pretrained(directory)
                for rank in RANKS:
                    print(f"{name:28} rank {rank}: {_of_rank(name, rank)}", flush=True)
            except ModuleNotFoundError as error:
                print(f"{name:28} is left out: {error}")
            except Exception as error:
                failed = True
                print(f"{name:28} {type(error).__name__}: {error}")
    if failed:
        raise SystemExit(1)


def _of_rank(name: str, rank: int) -> str:
    # torchtitan asks for a package of its own for the attention of an H100.
    gpu = "a100" if name == "torchtitan" else "h100"
    profile = trace(PROGRAMS[name], device="cuda", gpu=gpu, world_size=WORLD, rank=rank)
    kinds = ", ".join(f"{kind} {size / 2**20:.2f}" for kind, size in profile.by_kind().items())
    return f"peak {profile.peak / 2**20:.2f} MiB ({kinds})"


if __name__ == "__main__":
    main()
