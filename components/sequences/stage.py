"""Chats to memory-mapped token sequences with loss masks."""

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from components.chats.rows import Row, is_held_out, read_rows
from components.chats.template import Template
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "train"
VERSION = 1
INPUTS = {
    "chats": Port("regenerated chats with prompt_token_ids and token_ids, or chats that end on an assistant turn"),
    "model": Port("the model folder whose tokenizer and vocabulary the chats use"),
}
OUTPUTS = {
    "{train,val}.bin": "int32 [chunks, sequence_length], C order: token ids",
    "{train,val}.mask.bin": "uint8 [chunks, sequence_length]: 1 where the token counts as a target",
    "{train,val}.starts.bin": "int64 [documents]: offset of each document's first token in the flattened ids",
    "index.json": "sequence length, separator, padding, vocabulary size, what counts, and sizes per split",
}


class Config(StageConfig):
    """How rows become sequences."""

    template: Template = Field(Template(), description="How rows that come as text are rendered")
    sequence_length: int = Field(16384, description="Tokens per sequence (chunk)", ge=8)
    held_out: float = Field(0.05, description="Expected share of rows in the val split", gt=0, lt=1)
    truncated: Literal["keep", "drop"] = Field(
        "drop", description="What to do with unfinished answers (finish_reason length); a kept one gets no end token"
    )
    count: Literal["all", "answer", "all_and_separator"] = Field(
        "all",
        description="Which tokens are loss targets: all of a row, its answer alone, or all and the separator added "
        "after it; the first token of a document and padding never are",
    )
    boundaries: Literal["leak", "reset"] = Field(
        "leak",
        description="leak: documents of one sequence attend to the ones before them, as in the published recipe; "
        "reset: attention ends at the document's start, refused for models with recurrent layers. Sequences cut "
        "documents either way",
    )
    seed: int = Field(42, description="Seed of the order of rows")


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Split, order, join and cut the rows; write both splits and ``index.json``.

    Raises:
        UserError: the tokenizer has no eos token, a split would be empty, no token counts, a row is damaged, sequences
            are longer than the model knows positions, or ``boundaries: reset`` is asked of a model that cannot.
    """
    from components.checkpoint.config import read_config
    from components.checkpoint.load import load_tokenizer
    from components.sequences.encode import with_token_ids
    from components.sequences.packing import Documents, document, pack

    model = inputs["model"].path
    shape = read_config(model)
    shape = {**shape, **shape.get("text_config", {})}
    if config.boundaries == "reset" and (layer := recurrent_layer(shape)):
        raise UserError(f"boundaries: {model} has {layer} layers, whose state no kernel here resets; use leak")
    known = shape.get("max_position_embeddings") or config.sequence_length
    if config.boundaries == "leak" and config.sequence_length > known:
        raise UserError(
            f"sequence_length {config.sequence_length}: {model} knows {known} positions; make sequences no longer"
        )
    tokenizer = load_tokenizer(model)
    separator = tokenizer.eos_token_id
    if separator is None:
        raise UserError(f"{model}: its tokenizer has no eos token, which separates the documents")
    splits = {split: Documents(output.scratch, split, config.seed) for split in ("train", "val")}
    dropped = 0

    def kept() -> Iterator[Row]:
        nonlocal dropped
        for row in read_rows(inputs["chats"].path):
            if row.get("finish_reason") == "length" and config.truncated == "drop":
                dropped += 1
            else:
                yield row

    for row in with_token_ids(kept(), tokenizer, config.template):
        one = document(row, separator, shape["vocab_size"], config.count)
        splits["val" if is_held_out(one.row_id, config.held_out) else "train"].append(one)
    sizes = {}
    for split, documents in splits.items():
        if not documents:
            raise UserError(
                f"{inputs['chats'].uri}: the {split} split has no rows ({dropped} unfinished answers dropped); "
                "more chats, another held_out share or truncated: keep are needed"
            )
        sizes[split] = pack(documents.shuffled(), output.path, split, config.sequence_length, separator)
        if not sizes[split]["counted"]:
            raise UserError(f"{inputs['chats'].uri}: no token of the {split} split counts; the rows hold no answers")
    index = {
        "sequence_length": config.sequence_length,
        "vocabulary_size": shape["vocab_size"],
        "separator": separator,
        "padding": separator,
        "count": config.count,
        "boundaries": config.boundaries,
        "splits": sizes,
    }
    (output.path / "index.json").write_text(json.dumps(index, indent=1))
    return {
        "dropped_truncated": dropped,
        **{f"{split}_{key}": n for split, size in sizes.items() for key, n in size.items()},
    }


def recurrent_layer(config: dict[str, Any]) -> str | None:
    """Return what kind of layer of a text config carries state from token to token, or None: all is attention."""
    attention = {"full_attention", "sliding_attention", "chunked_attention"}
    kinds = sorted(set(config.get("layer_types") or attention) - attention)
    kinds += [key for key in config if key.startswith(("mamba_", "ssm_", "linear_conv_"))]
    return kinds[0] if kinds else None
