"""A tokenizer of words and tiny configurations of models of transformers."""

import json
from pathlib import Path
from typing import Any

from benchmarks.programs_of_others.data import WORDS

_SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text(encoding="utf-8"))

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<sep>", "<cls>"]
CHAT = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' ' }}"
    "{% endfor %}"
)


def tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        sep_token="<sep>",
        cls_token="<cls>",
        model_max_length=64,
    )
    made.chat_template = CHAT
    return made


def settings(kind: str) -> dict[str, Any]:
    """Return a tiny configuration of a kind of model; ``like`` names one that it goes on from."""
    own = dict(_SETTINGS[kind])
    like = own.pop("like", None)
    return {**(settings(like) if like else {}), **own}


def configuration(kind: str) -> Any:
    """Return a tiny configuration of a kind of model that ``AutoConfig`` knows."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **settings(kind))
