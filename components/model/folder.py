"""What a model folder must hold for the later stages, and what is said about it."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError


def complete(folder: Path) -> dict[str, Any]:
    """Check ``folder`` and write ``generation_config.json`` where it does not say what ends an answer.

    Returns architecture, parameters, bytes, dtypes, vocabulary and hidden size. Raises :class:`UserError` naming the
    missing part.
    """
    config = _json(folder / "config.json")
    tensors = _tensors(folder)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError("model: no tokenizer (tokenizer.json) in the source")
    tokenizer = _json(folder / "tokenizer_config.json")
    if not (folder / "chat_template.jinja").exists() and "chat_template" not in tokenizer:
        raise UserError(
            "model: no chat template (chat_template.jinja) in the source; an instruction-tuned model is needed"
        )
    _demand_finite(folder)
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise UserError("model: text_config in config.json is no JSON object")
    generation = folder / "generation_config.json"
    values = _json(generation) if generation.exists() else {}
    if values.get("eos_token_id") is None:
        eos = text.get("eos_token_id", config.get("eos_token_id"))
        if eos is None:
            raise UserError("model: neither generation_config.json nor config.json says which token ends an answer")
        generation.write_text(json.dumps(values | {"eos_token_id": eos}, indent=2) + "\n")
    counts: dict[str, int] = {}
    for entry in tensors.values():
        size = 1
        for length in entry["shape"]:
            size *= length
        counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + size
    return {
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "parameters": sum(counts.values()),
        "parameters_by_dtype": counts,
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "hidden_size": text.get("hidden_size"),
        "vocab_size": text.get("vocab_size"),
        "layers": text.get("num_hidden_layers"),
    }


def set_chat_template(folder: Path, text: str) -> None:
    """Make ``text`` the only chat template of a model folder, for its tokenizer and for its processor."""
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.json").unlink(missing_ok=True)
    for path in (folder / "tokenizer_config.json", folder / "processor_config.json"):
        if path.exists() and "chat_template" in (values := _json(path)):
            del values["chat_template"]
            path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"model: no {path.name} in the source") from error
    except ValueError as error:
        raise UserError(f"model: {path.name} is not JSON") from error
    if not isinstance(document, dict):
        raise UserError(f"model: {path.name} is no JSON object")
    return document


def _tensors(folder: Path) -> dict[str, dict[str, Any]]:
    """Return every tensor's header; checks that each file is whole and that the index names no other."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("model: no safetensors weights in the source; other formats are not taken")
    tensors: dict[str, dict[str, Any]] = {}
    for path in files:
        try:
            with path.open("rb") as stream:
                length = struct.unpack("<Q", stream.read(8))[0]
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (struct.error, ValueError, MemoryError, OverflowError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"model: {path.name} is not a safetensors file") from error
        if path.stat().st_size != 8 + length + end:
            raise UserError(f"model: {path.name} is cut short; fetch it again")
        tensors |= header
    index = folder / "model.safetensors.index.json"
    if index.exists() and not isinstance(_json(index).get("weight_map"), dict):
        raise UserError(f"model: {index.name} has no weight_map")
    if index.exists() and (missing := set(_json(index)["weight_map"]) - set(tensors)):
        raise UserError(f"model: {len(missing)} tensors of the index are in no file, {sorted(missing)[0]} for one")
    return tensors


def _demand_finite(folder: Path) -> None:
    tensors = Tensors(folder)
    for name in tensors:
        tensor = tensors[name]
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.isfinite().all():
            raise UserError(f"model: {name} holds values that are not finite; the source is damaged")
