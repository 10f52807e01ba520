"""A tokenizer of one token a byte, for tests of the core role: no transformers needed."""

import json
from pathlib import Path

from tests.components.conftest import CHAT_TEMPLATE, SPECIAL_TOKENS


def byte_tokenizer(folder: Path) -> Path:
    """Write the tokenizer files of a model folder into ``folder``; return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder.mkdir(exist_ok=True)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet))
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
