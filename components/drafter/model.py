"""The DFlash drafter: built, loaded and saved with speculators' classes, so that vLLM loads the folder as it is."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import PretrainedConfig, Qwen3Config

from components.checkpoint.config import read_config
from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError, one_line
from components.drafter.attention import IMPLEMENTATION

INITIALISER_STD = 0.02
OF_A_TARGET = ("num_key_value_heads", "intermediate_size", "rms_norm_eps", "rope_theta")
UNTIED = {"tie_word_embeddings": False}
NOT_OF_A_LAYER = {"architectures", "auto_map", "block_size", "dflash_config", "model_type", "num_target_layers"}


def text_config(target: PretrainedConfig) -> PretrainedConfig:
    """Return the language part of a target's config."""
    return target.get_text_config()


def build(
    target: PretrainedConfig,
    *,
    layers: int,
    taps: list[int],
    block_size: int,
    mask_token: int,
    window: int | None = None,
    heads: int | None = None,
    key_value_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    draft_tokens: torch.Tensor | None = None,
) -> DFlashDraftModel:
    """Make a drafter with random weights for ``target``.

    Width, rotary base and vocabulary are the target's; head counts and the MLP's width default to the target's.
    ``taps`` are decoder layers counted from 0. ``draft_tokens`` (sorted ids) trims the drafter's vocabulary.

    ``sliding_window_non_causal`` is always set: without it vLLM takes *every* layer as causal.

    Raises:
        UserError: the target is of another kind, or the head counts do not divide.
    """
    text = text_config(target)
    rope = getattr(text, "rope_parameters", None) or {}
    lacks = [name for name in OF_A_TARGET if getattr(text, name, None) is None and name not in rope]
    if lacks:
        raise UserError(f"target: a {text.model_type} model has no {', '.join(lacks)}; a drafter's layers need them")
    heads = heads or text.num_attention_heads
    if heads % (key_value_heads or text.num_key_value_heads):
        raise UserError(
            f"drafter.key_value_heads: {key_value_heads or text.num_key_value_heads} do not divide {heads} heads"
        )
    own_head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer = Qwen3Config(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=intermediate_size or text.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads or text.num_key_value_heads,
        head_dim=head_dim or own_head_dim,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        initializer_range=INITIALISER_STD,
        tie_word_embeddings=False,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
        layer_types=["sliding_attention" if window else "full_attention"] * layers,
    )
    vocabulary = text.vocab_size if draft_tokens is None else len(draft_tokens)
    config = _speculator(layer, block_size, taps, mask_token, vocabulary, list(target.architectures or []))
    drafter = DFlashDraftModel(config)
    if draft_tokens is not None:
        kept = torch.zeros(text.vocab_size, dtype=torch.bool)
        kept[draft_tokens] = True
        drafter.load_vocab_mappings(kept, draft_tokens - torch.arange(len(draft_tokens)))
    return drafter


def _speculator(
    layer: Qwen3Config, block_size: int, taps: list[int], mask_token: int, vocabulary: int, architectures: list[str]
) -> DFlashSpeculatorConfig:
    layer._attn_implementation = IMPLEMENTATION
    return DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=vocabulary,
        block_size=block_size,
        aux_hidden_state_layer_ids=[tap + 1 for tap in taps],
        mask_token_id=mask_token,
        sliding_window_non_causal=True,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block_size - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=architectures),
        ),
    )


def taps_of(drafter: DFlashDraftModel) -> list[int]:
    """Return the tapped decoder layers, counted from 0 (speculators stores them plus one)."""
    return [layer - 1 for layer in drafter.config.aux_hidden_state_layer_ids]


def window_of(drafter: DFlashDraftModel) -> int | None:
    """Return the attention window in tokens, or None for full attention."""
    layer = drafter.config.transformer_layer_config
    return layer.sliding_window if "sliding_attention" in (layer.layer_types or []) else None


def attach(drafter: DFlashDraftModel, target: torch.nn.Module) -> DFlashDraftModel:
    """Give the drafter the target's own embedding and output head, frozen, and the target's device.

    A trimmed head is a copy of the drafted rows.

    Raises:
        UserError: vocabulary, width, taps or mask token are not the target's, with the numbers.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    wanted = tuple(drafter.embed_tokens.weight.shape)
    if tuple(embedding.shape) != wanted:
        raise UserError(
            f"drafter: made for an embedding of {wanted}, the target's is {tuple(embedding.shape)}; "
            "the two do not belong together"
        )
    layers, taps = text_config(target.config).num_hidden_layers, taps_of(drafter)
    if not set(taps) <= set(range(layers)) or len(set(taps)) < len(taps):
        raise UserError(f"drafter: taps layers {taps}, the target has {layers} layers, counted from 0; each once")
    if not 0 <= drafter.mask_token_id < len(embedding):
        raise UserError(f"drafter: mask token {drafter.mask_token_id}, the target's vocabulary has {len(embedding)}")
    if drafter.t2d is not None:
        head = head[drafter.t2d.to(head.device)]
    for module, weight in ((drafter.embed_tokens, embedding), (drafter.lm_head, head)):
        module.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    drafter.verifier_lm_head, drafter.verifier_norm = None, None
    return drafter.to(embedding.device).eval()  # dropout of an earlier drafter could not be resumed exactly


def trained_parameters(drafter: DFlashDraftModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that training moves, by name: everything but the shared embedding and head."""
    return {name: value for name, value in drafter.named_parameters() if value.requires_grad}


def save(drafter: DFlashDraftModel, folder: Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` in bfloat16, in the layout vLLM loads.

    The shared embedding is left out, the shared head too unless the vocabulary is trimmed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16) for name, value in trained_parameters(drafter).items()}
    if drafter.t2d is not None:
        tensors |= {"lm_head.weight": drafter.lm_head.weight.detach().to(torch.bfloat16)}
        tensors |= {"d2t": drafter.d2t, "t2d": drafter.t2d}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config_of(drafter), indent=2, sort_keys=True) + "\n")


def config_of(drafter: DFlashDraftModel) -> dict[str, Any]:
    """Return the ``config.json`` of a drafter stored in bfloat16, as vLLM reads it."""
    written: dict[str, Any] = drafter.config.to_dict()
    written |= {"architectures": ["DFlashDraftModel"], "dtype": "bfloat16"}
    written["transformer_layer_config"] |= {"dtype": "bfloat16"}
    return written


def read(folder: Path) -> DFlashDraftModel:
    """Make the drafter a folder's config describes, with random weights; a trimmed vocabulary is read with it.

    The folder has speculators' layout, or that of the public drafters, whose ``dflash_config`` names the taps.

    Raises:
        UserError: the folder is no DFlash drafter, or one whose slots see or predict otherwise than ours, or whose
            trimmed vocabulary is none.
    """
    document = read_config(folder)
    try:
        drafter = DFlashDraftModel(_config(folder, document))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, StrictDataclassError) as error:
        what = "config.json is not a DFlash drafter's; give an artifact of the drafter stage"
        raise UserError(f"drafter {folder}: {what} ({one_line(error, 120)})") from error
    if drafter.config.mask_token_id is None:
        raise UserError(f"drafter {folder}: config.json is not a DFlash drafter's (mask_token_id is not set)")
    if drafter.config.sample_from_anchor:
        raise UserError(f"drafter {folder}: its anchors predict too (sample_from_anchor), which vLLM does not serve")
    if len(kinds := set(drafter.config.transformer_layer_config.layer_types or [])) > 1:
        raise UserError(f"drafter {folder}: layers of several kinds ({', '.join(sorted(kinds))}); all must be of one")
    if drafter.t2d is not None:
        tensors = Tensors(folder)
        t2d, d2t = tensors["t2d"], tensors["d2t"]
        kept = t2d.flatten().nonzero()[:, 0]
        same_shapes = (t2d.shape, d2t.shape) == (drafter.t2d.shape, drafter.d2t.shape)
        if not same_shapes or not torch.equal(d2t.long(), kept - torch.arange(len(kept))):
            raise UserError(f"drafter {folder}: t2d and d2t name no {len(drafter.d2t)} tokens, in their order")
        drafter.load_vocab_mappings(t2d, d2t)
    return drafter


def _config(folder: Path, document: dict[str, Any]) -> DFlashSpeculatorConfig:
    if document.get("speculators_model_type") == "dflash":
        config = DFlashSpeculatorConfig.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = IMPLEMENTATION
        config.sliding_window_non_causal = True
        return config
    public = document["dflash_config"]
    return _speculator(
        Qwen3Config(**{name: value for name, value in document.items() if name not in NOT_OF_A_LAYER} | UNTIED),
        document.get("block_size") or public["block_size"],
        public["target_layer_ids"],
        public["mask_token_id"],
        document["vocab_size"],
        [],
    )


def load_weights(drafter: DFlashDraftModel, folder: Path) -> None:
    """Read a folder's trained tensors, in float32.

    Raises:
        UserError: as :func:`check_weights` says.
    """
    check_weights(drafter, folder)
    tensors = Tensors(folder)
    with torch.no_grad():
        for name, weight in trained_parameters(drafter).items():
            weight.copy_(tensors[name])


def check_weights(drafter: DFlashDraftModel, folder: Path) -> None:
    """Demand that a folder has the drafter's trained tensors.

    Raises:
        UserError: tensors are missing or unknown, as they are when the folder holds a quantised drafter, or of another
            shape, or not finite.
    """
    tensors, weights = Tensors(folder), trained_parameters(drafter)
    shared = {"t2d", "d2t", "lm_head.weight"} if drafter.t2d is not None else set()
    if odd := sorted(set(tensors) ^ (set(weights) | shared)):
        raise UserError(
            f"drafter {folder}: tensors missing or unknown: {', '.join(odd[:4])}; is it quantised already?"
        )
    for name, weight in weights.items():
        if tensors.shape(name) != weight.shape:
            raise UserError(f"drafter {folder}: {name} is {list(tensors.shape(name))}, not {list(weight.shape)}")
    check_finite(folder, ((name, tensors[name]) for name in weights))


def check_finite(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Demand that a folder's tensors hold numbers: with others the loss would be none from the first step on.

    Raises:
        UserError: it names the first that does not.
    """
    for name, tensor in tensors:
        if not tensor.isfinite().all():
            raise UserError(f"{folder}: {name} holds values that are not finite; it is damaged")


def check_group(drafter: DFlashDraftModel, group_size: int) -> None:
    """Refuse widths that the quantisation group does not divide.

    Raises:
        UserError: it names the first linear and its width.
    """
    for name, module in drafter.named_modules():
        if isinstance(module, torch.nn.Linear) and module.weight.requires_grad and module.in_features % group_size:
            raise UserError(
                f"drafter: {name} is {module.in_features} wide, which group_size {group_size} does not divide; "
                "set a group that does, here and in gptq"
            )
