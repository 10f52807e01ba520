"""Proofs that the packed target is what was trained; each failure ends the stage."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from components.checkpoint.census import architecture_of, compare
from components.checkpoint.grid import PACKED, SCALE, SHAPE, quantized_modules, unpack_codes
from components.checkpoint.load import load_model, load_tokenizer
from components.checkpoint.quantize import dequantize, fake_quantize, integer_codes
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import passthrough_names, passthrough_tensors
from components.contract.errors import UserError
from components.contract.log import Log
from components.pack.latents import Latents, same_bytes
from components.sequences.reader import read_index, read_split

PIECE = 128
"""Tokens of one forward pass, whose logits are a row of the vocabulary each."""


def prove_tensors(target: Tensors, latents: Latents, log: Log) -> dict[str, tuple[tuple[int, int], float]]:
    """Read the written target back and compare it with the student and the latents, module by module.

    Proved: the census is the student's; scales and shapes are the student's bytes; unpacked codes are the latents'
    integer codes; the student's own weights, put through the same path, have the student's codes; other tensors are
    equal.

    Returns:
        Module name to (shape, share of codes that differ from the student's).
    """
    compare(quantized_modules(target), latents.modules, f"census of {target.folder}")
    changed = {}
    for done, module in enumerate(latents.modules, 1):
        where = f"{target.file(f'{module}.{PACKED}')}: {module}"
        original = latents.original(module)
        scales = target[f"{module}.{SCALE}"]
        for kind, found in ((SCALE, scales), (SHAPE, target[f"{module}.{SHAPE}"])):
            if not same_bytes(found, latents.student[f"{module}.{kind}"]):
                raise UserError(f"{where}: {kind} is not the student's bytes")
        packed, before = target[f"{module}.{PACKED}"], latents.student[f"{module}.{PACKED}"]
        same = torch.equal(packed, before)
        codes = original.codes if same else unpack_codes(packed, original.bits, original.codes.shape[1])
        latent = None if module in latents.carried else latents.latent(module, original)
        expected = original.codes if latent is None else integer_codes(latent, scales, original.bits)
        untouched = dequantize(original.codes, scales, scales.dtype if latent is None else latent.dtype)
        if not torch.equal(integer_codes(untouched, scales, original.bits), original.codes):
            raise UserError(f"{where}: the student's own weights do not have the student's own codes")
        if not torch.equal(codes, expected):
            raise UserError(f"{where}: unpacked codes are not the integer codes of the latents")
        share = int(torch.count_nonzero(codes != original.codes)) / codes.numel()
        changed[module] = ((codes.shape[0], codes.shape[1]), share)
        log.progress(done, len(latents.modules), module=module)
    dense = passthrough_names(latents.student)
    compare(passthrough_names(target), dense, f"dense tensors of {target.folder}")
    for name in dense:
        if not same_bytes(target[name], latents.student[name]):
            raise UserError(f"{target.file(name)}: {name} is not the student's")
    return changed


def prove_end(target: Path) -> None:
    """Demand that generation stops at the token that ends a chat turn: the tokenizer's ``eos``."""
    token = load_tokenizer(target).eos_token_id
    given = target / "generation_config.json"
    path = given if given.is_file() else target / "config.json"  # as serving engines choose
    stops = json.loads(path.read_text()).get("eos_token_id")
    if token is None or token not in (stops if isinstance(stops, list) else [stops]):
        raise UserError(f"{path}: eos_token_id is {stops}, the tokenizer's is {token}; answers would not end")


def held_out_pieces(sequences: Path, tokens: int, seed: int) -> list[Tensor]:
    """Return pieces of the val split, int64 [1, at most 128], drawn by ``seed`` until they hold ``tokens`` tokens.

    They are fewer where the split is shorter; none holds padding.
    """
    size = read_index(sequences)["splits"]["val"]["tokens"]
    ids = read_split(sequences, "val").ids.reshape(-1)[:size]
    order = torch.randperm(-(-size // PIECE), generator=torch.Generator().manual_seed(seed))
    starts = sorted(PIECE * order[: -(-tokens // PIECE)])
    return [torch.from_numpy(ids[start : start + PIECE].astype("int64")).unsqueeze(0) for start in starts]


@torch.inference_mode()
def logit_difference(target: Path, latents: Latents, pieces: list[Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Compare the target as transformers itself reads it with the fake-quantised student; one in memory at a time.

    Args:
        target: folder that was packed.
        latents: what it was packed from.
        pieces: token ids, int64 [1, length] each.
        dtype: of both models' weights and computation.

    Returns:
        ``kl``: mean over tokens of KL(student ‖ target) in nats; ``max_logit_difference``; ``proof_tokens``.
    """
    expected = _logits(load_model(latents.student.folder, dtype, _fake_quantized(latents, dtype)), pieces)
    reader = architecture_of(AutoConfig.from_pretrained(target)) or AutoModelForCausalLM
    found = _logits(reader.from_pretrained(target, dtype=dtype), pieces)
    kl = difference = 0.0
    for reference, logits in zip(expected, found, strict=True):
        log_p, log_q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
        kl += float((log_p.exp() * (log_p - log_q)).sum())
        difference = max(difference, float((reference.float() - logits.float()).abs().max()))
    tokens = sum(map(len, expected))
    return {"kl": kl / tokens, "max_logit_difference": difference, "proof_tokens": tokens}


def _logits(model: PreTrainedModel, pieces: list[Tensor]) -> list[Tensor]:
    return [model(input_ids=piece, use_cache=False).logits[0] for piece in pieces]


def _fake_quantized(latents: Latents, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield what the trainer's last forward computed with, in ``dtype``."""
    yield from passthrough_tensors(latents.student)
    for module in latents.trained:
        original = latents.original(module, codes=False)
        latent = latents.latent(module, original).float()
        yield f"{module}.weight", fake_quantize(latent, original.scales, original.bits).to(dtype)
