"""Model folders as transformers models: dense ones as they are, W4A16 ones unpacked exactly."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from components.checkpoint.config import read_config
from components.checkpoint.unpack import dense_tensors
from components.contract.errors import UserError, one_line


def load_model(
    folder: Path, dtype: torch.dtype = torch.bfloat16, weights: Iterable[tuple[str, Tensor]] | None = None
) -> PreTrainedModel:
    """Load a dense or W4A16 folder as a causal language model with dense weights, in eval mode, attention by SDPA.

    A W4A16 weight is codes × scales, rounded once to ``dtype``. Of a multimodal checkpoint the text model is loaded.
    ``weights``, by stored names, take the place of all of the folder's own.

    Raises:
        UserError: the folder is damaged, of an unknown architecture, or lacks or adds tensors.
    """
    folder = Path(folder)
    logging.disable_progress_bar()
    config = load_config(folder)
    architecture = AutoModelForCausalLM._model_mapping[type(config)]
    if architecture.config_class is not type(config):
        config = config.get_text_config()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model, report = architecture.from_pretrained(
        None,
        config=config,
        state_dict=dict(dense_tensors(folder, dtype) if weights is None else weights),
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are named below
    )
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[fault]:
            names = sorted(map(str, report[fault]))
            raise UserError(f"{folder}: {fault.replace('_', ' ')} in its tensors: {', '.join(names[:5])}")
    model.config._name_or_path = str(folder)
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_config(folder: Path) -> Any:
    """Return what transformers makes of a folder's config.json: with the defaults of what it leaves out.

    Raises:
        UserError: it is damaged, or not a causal language model's that transformers knows.
    """
    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM._model_mapping[type(config)]
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        raise UserError(
            f"{folder / 'config.json'}: not a causal language model that transformers knows ({one_line(error, 120)})"
        ) from error
    return config


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder, its chat template with it.

    Raises:
        UserError: there is none; where its files are missing transformers makes some an empty one instead.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no tokenizer that loads ({error})") from error
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):
        raise UserError(f"{folder}: no tokenizer that loads (its vocabulary is empty; are its files missing?)")
    return tokenizer
