"""Language models of transformers: training, generating, sentence transformers."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.programs_of_others.data import text
from benchmarks.programs_of_others.drivers.tiny import configuration, tokenizer
from benchmarks.programs_of_others.drivers.vision import device


def causal_training(kind: str) -> Callable[[], None]:
    """Train a causal language model for two steps, with padding and clipping."""
    from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

    config = configuration(kind)
    made = tokenizer()

    def program() -> None:
        model = AutoModelForCausalLM.from_config(config).to(device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = get_linear_schedule_with_warmup(optimizer, 1, 4)
        model.train()
        for _ in range(2):
            lines = [line[: 20 + 5 * i] for i, line in enumerate(text(4).splitlines())]
            batch = made(
                lines,
                padding="max_length",
                max_length=16,
                truncation=True,
                return_tensors="pt",
                return_token_type_ids=False,
            ).to(device())
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(loss.item())

    return program


def masked_training(kind: str) -> Callable[[], None]:
    """Train a masked language model on a collator's batches."""
    from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

    config = configuration(kind)
    made = tokenizer()

    def program() -> None:
        model = AutoModelForMaskedLM.from_config(config).to(device())
        collate = DataCollatorForLanguageModeling(made, mlm=True, mlm_probability=0.3)
        rows = [
            made(
                line,
                return_token_type_ids=False,
                padding="max_length",
                max_length=32,
                truncation=True,
            )
            for line in text(4).splitlines()
        ]
        batch = collate(rows).to(device())
        loss = model(**batch).loss
        loss.backward()
        print(loss.item())

    return program


def permuted_training(kind: str) -> Callable[[], None]:
    """Train a model whose class for language models is its own."""
    from transformers import AutoModelForSequenceClassification

    config = configuration(kind)
    config.pad_token_id = 0

    def program() -> None:
        model = AutoModelForSequenceClassification.from_config(config).to(device())
        ids = torch.randint(7, 23, (2, 16), device=device())
        loss = model(input_ids=ids, labels=torch.tensor([0, 1], device=device())).loss
        loss.backward()
        print(loss.item())

    return program


def sequence_training(kind: str) -> Callable[[], None]:
    """Train a sequence-to-sequence model and translate with beams."""
    from transformers import AutoModelForSeq2SeqLM

    config = configuration(kind)
    made = tokenizer()

    def program() -> None:
        model = AutoModelForSeq2SeqLM.from_config(config).to(device())
        optimizer = torch.optim.AdamW(model.parameters())
        batch = made(
            text(3).splitlines(), padding=True, return_tensors="pt", return_token_type_ids=False
        ).to(device())
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        model.eval()
        found = model.generate(
            **batch,
            num_beams=3,
            max_new_tokens=6,
            length_penalty=0.8,
            no_repeat_ngram_size=2,
            early_stopping=True,
        )
        print(made.batch_decode(found, skip_special_tokens=True))

    return program


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.7},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True},
    "beam-sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "penalties": {
        "do_sample": True,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
        "typical_p": 0.9,
    },
    "scores": {"output_scores": True, "return_dict_in_generate": True, "do_sample": True},
    "static-cache": {"cache_implementation": "static"},
    "assisted": {"prompt_lookup_num_tokens": 3},
}


def generation(kind: str, way: str) -> Callable[[], None]:
    """Generate text from two prompts of different length, and decode it."""
    from transformers import AutoModelForCausalLM

    config = configuration(kind)
    made = tokenizer()
    made.padding_side = "left"

    def program() -> None:
        model = AutoModelForCausalLM.from_config(config).to(device()).eval()
        prompts = ["the cat sees"] if way == "assisted" else ["the cat sees", "a dog"]
        batch = made(prompts, padding=True, return_tensors="pt", return_token_type_ids=False).to(
            device()
        )
        found = model.generate(**batch, max_new_tokens=8, **WAYS[way])
        if way == "scores":
            scores = model.compute_transition_scores(
                found.sequences, found.scores, normalize_logits=True
            )
            for token, score in zip(found.sequences[0, 3:], scores[0], strict=False):
                print(f"| {token:5d} | {made.decode(token):8s} | {score.cpu().numpy():.3f}")
            found = found.sequences
        print(made.batch_decode(found, skip_special_tokens=True))

    return program


def streamed() -> Callable[[], None]:
    """Generate in a thread and print from a streamer, as the documentation shows."""
    from threading import Thread

    from transformers import AutoModelForCausalLM, TextIteratorStreamer

    config = configuration("llama")
    made = tokenizer()

    def program() -> None:
        model = AutoModelForCausalLM.from_config(config).to(device()).eval()
        inputs = made(["the cat sees"], return_tensors="pt", return_token_type_ids=False).to(
            device()
        )
        streamer = TextIteratorStreamer(made, timeout=20)
        thread = Thread(
            target=model.generate, kwargs=dict(inputs, streamer=streamer, max_new_tokens=6)
        )
        thread.start()
        for piece in streamer:
            print(piece, end="")
        thread.join()

    return program


def sentences() -> Callable[[], None]:
    """Train a sentence transformer and rank sentences by similarity."""
    import sentence_transformers as st
    from sentence_transformers import losses, models
    from sentence_transformers.util import semantic_search
    from transformers import BertModel

    made = tokenizer()
    BertModel(configuration("bert")).save_pretrained("tiny")
    made.save_pretrained("tiny")

    def program() -> None:
        words = models.Transformer("tiny", max_seq_length=16)
        model = st.SentenceTransformer(
            modules=[words, models.Pooling(words.get_word_embedding_dimension())]
        )
        features = {
            key: value.to(model.device) if hasattr(value, "to") else value
            for key, value in model.tokenize(text(4).splitlines()).items()
        }
        loss = losses.MultipleNegativesRankingLoss(model)([features, features], None)
        loss.backward()
        found = model.encode(text(4).splitlines(), convert_to_tensor=True)
        print(semantic_search(found[:1], found, top_k=2))
        print(model.encode(["the cat"]).shape)

    return program
