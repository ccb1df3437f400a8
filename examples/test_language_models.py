"""A decoder and an encoder of ``transformers``, made from a config: no weights are downloaded."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture
def decoder():
    config = transformers.GPT2Config(n_layer=6, n_positions=512)
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture
def encoder():
    config = transformers.BertConfig(num_hidden_layers=4)
    return transformers.BertForMaskedLM(config)


def test_decoder(torchmem, decoder):
    ids = torch.randint(0, decoder.config.vocab_size, (4, 512))
    torchmem.check(decoder, input_ids=ids, labels=ids)


def test_encoder(torchmem, encoder):
    ids = torch.randint(0, encoder.config.vocab_size, (8, 128))
    mask = torch.ones_like(ids)
    mask[0, 100:] = 0  # values that are known: the model may look at them
    torchmem.check(encoder, input_ids=ids, attention_mask=mask, labels=ids)


@pytest.mark.memory_budget("22 GiB", device="cuda", gpu="rtx-4090")
def test_a_larger_decoder_fits(torchmem):
    with torch.device("meta"):  # nothing is allocated, here or on the GPU
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=22,
                num_attention_heads=32,
                num_key_value_heads=4,
            )
        ).to(torch.bfloat16)
    ids = torch.randint(0, 32000, (4, 2048))
    torchmem.check(model, input_ids=ids, labels=ids)
