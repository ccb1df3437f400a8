"""The trainers of transformers and trl, peft's adapters, bitsandbytes' layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.programs_of_others.data import text
from benchmarks.programs_of_others.drivers.tiny import configuration, tokenizer
from benchmarks.programs_of_others.drivers.vision import device


def trainer(kind: str) -> Callable[[], None]:
    """Train with transformers' Trainer: evaluation, metrics, a checkpoint, the best model."""
    import numpy
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        BertForSequenceClassification,
        DataCollatorForLanguageModeling,
        DataCollatorForSeq2Seq,
        DataCollatorWithPadding,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        Trainer,
        TrainingArguments,
    )

    made = tokenizer()
    rows = Dataset.from_dict({"text": text(24).splitlines(), "labels": [i % 2 for i in range(24)]})
    rows = rows.map(
        lambda row: made(row["text"], truncation=True, max_length=16), remove_columns="text"
    )
    rows = rows.remove_columns([name for name in ("token_type_ids",) if name in rows.column_names])
    common: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "report_to": [],
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "logging_steps": 1,
        "disable_tqdm": True,
    }

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((numpy.argmax(found.predictions, -1) == found.label_ids).mean())}

    def program() -> None:
        if kind == "classification":
            model = BertForSequenceClassification(configuration("bert"))
            arguments = TrainingArguments(
                **common, load_best_model_at_end=True, metric_for_best_model="accuracy"
            )
            made_trainer = Trainer(
                model,
                arguments,
                train_dataset=rows,
                eval_dataset=rows,
                data_collator=DataCollatorWithPadding(made),
                compute_metrics=accuracy,
            )
        elif kind == "causal":
            model = AutoModelForCausalLM.from_config(configuration("llama"))
            arguments = TrainingArguments(
                **common, gradient_accumulation_steps=2, gradient_checkpointing=True
            )
            made_trainer = Trainer(
                model,
                arguments,
                train_dataset=rows.remove_columns("labels"),
                eval_dataset=rows.remove_columns("labels"),
                data_collator=DataCollatorForLanguageModeling(made, mlm=False),
            )
        else:
            model = AutoModelForSeq2SeqLM.from_config(configuration("t5"))
            seq_rows = rows.remove_columns("labels").map(lambda row: {"labels": row["input_ids"]})
            seq_arguments = Seq2SeqTrainingArguments(
                **common, predict_with_generate=True, generation_max_length=6
            )
            made_trainer = Seq2SeqTrainer(
                model,
                seq_arguments,
                train_dataset=seq_rows,
                eval_dataset=seq_rows,
                data_collator=DataCollatorForSeq2Seq(made, model),
            )
        result = made_trainer.train()
        print(result.metrics["train_loss"], made_trainer.evaluate())

    return program


def trl_training(kind: str) -> Callable[[], None]:
    """Train with one of trl's trainers."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    made = tokenizer()
    lines = text(16).splitlines()
    common: dict[str, Any] = {
        "output_dir": "out",
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": False,
    }
    AutoModelForCausalLM.from_config(configuration("llama")).save_pretrained("tiny")
    made.save_pretrained("tiny")
    pairs = Dataset.from_dict({"prompt": lines, "chosen": lines[::-1], "rejected": lines})

    def program() -> None:
        config = configuration("llama")
        model = "tiny"
        if kind == "sft":
            arguments = trl.SFTConfig(**common, max_length=16)
            rows = Dataset.from_dict({"text": lines})
            runner = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=made)
        elif kind == "dpo":
            arguments = trl.DPOConfig(**common, max_length=32)
            runner = trl.DPOTrainer(
                model, None, arguments, train_dataset=pairs, processing_class=made
            )
        elif kind == "reward":
            config.num_labels = 1
            scorer = AutoModelForSequenceClassification.from_config(config)
            arguments = trl.RewardConfig(**common, max_length=32)
            rows = pairs.remove_columns("prompt")
            runner = trl.RewardTrainer(scorer, arguments, train_dataset=rows, processing_class=made)
        else:
            config_of, trainer = (
                getattr(trl, kind.upper() + part) for part in ("Config", "Trainer")
            )
            arguments = config_of(**common, num_generations=2, max_completion_length=6)
            runner = trainer(
                model,
                lambda completions, **_: [float(len(set(c))) for c in completions],
                arguments,
                train_dataset=pairs.select_columns("prompt"),
                processing_class=made,
            )
        print(runner.train().training_loss)

    return program


def peft_training(kind: str) -> Callable[[], None]:
    """Train an adapter of peft, save it, merge it."""
    import peft
    from transformers import AutoModelForCausalLM

    def program() -> None:
        model = AutoModelForCausalLM.from_config(configuration("llama"))
        task = peft.TaskType.CAUSAL_LM
        config = {
            "lora": lambda: peft.LoraConfig(
                task_type=task, r=4, lora_dropout=0.1, target_modules="all-linear"
            ),
            "dora": lambda: peft.LoraConfig(
                task_type=task, r=4, use_dora=True, target_modules=["q_proj", "v_proj"]
            ),
            "ia3": lambda: peft.IA3Config(
                task_type=task,
                target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"],
            ),
            "prompt": lambda: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=4),
            "prefix": lambda: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4),
            "adalora": lambda: peft.AdaLoraConfig(
                task_type=task,
                target_modules=["q_proj"],
                total_step=10,
                tinit=1,
                tfinal=1,
                deltaT=1,
            ),
            "vera": lambda: peft.VeraConfig(
                task_type=task, r=4, target_modules=["q_proj", "v_proj"]
            ),
        }[kind]()
        adapted = peft.get_peft_model(model, config).to(device())
        adapted.print_trainable_parameters()
        optimizer = torch.optim.AdamW(adapted.parameters(), lr=1e-3)
        for step in range(3):
            ids = torch.randint(7, 23, (2, 12), device=device())
            loss = adapted(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            if kind == "adalora":
                adapted.base_model.update_and_allocate(step)
            optimizer.zero_grad()
        adapted.save_pretrained("adapter")
        if kind in ("lora", "dora", "ia3"):
            adapted.eval()
            print(adapted.merge_and_unload().generate(ids[:, :3], max_new_tokens=3).tolist())

    return program


def quantized(kind: str) -> Callable[[], None]:
    """Fine-tune over bitsandbytes' quantized layers."""
    import bitsandbytes

    def program() -> None:
        if kind == "nf4":
            layer = bitsandbytes.nn.Linear4bit(
                64, 64, quant_type="nf4", compute_dtype=torch.float32
            )
        else:
            layer = bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=6.0)
        model = nn.Sequential(nn.Linear(64, 64), layer, nn.ReLU(), nn.Linear(64, 4)).to(device())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        for _ in range(2):
            loss = model(torch.randn(8, 64, device=device())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(loss.item())

    return program
