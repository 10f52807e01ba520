"""From target, chats and perhaps an earlier drafter to a trained one, in as many processes as take part."""

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speculators.models.dflash.core import DFlashDraftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from components.chats.rows import read_rows
from components.checkpoint.load import load_model, load_tokenizer
from components.contract.context import Output
from components.contract.errors import UserError
from components.drafter import data, evaluate, features, model
from components.drafter.stage import Config
from components.drafter.train import Schedule, Trainer
from components.store.work import Work
from components.training.parallel import Ranks


def fit(
    config: Config,
    folders: dict[str, Path],
    scratch: Path,
    work: Work,
    output: Output | None = None,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> dict[str, Any]:
    """Train, evaluate and write the drafter; see the stage's ``OUTPUTS`` for the files.

    Args:
        config: of the stage.
        folders: ``target``, ``chats`` and perhaps ``init``.
        scratch: a folder; that of a machine's first rank is shared.
        work: the stage's parts.
        output: rank 0's alone.
        ranks: this process among those that train.

    Returns:
        The stage's metrics; of other ranks than 0 nothing.

    Raises:
        UserError: as the stage's ``run`` says.
    """
    scratch, dtype = ranks.shared(scratch), getattr(torch, config.dtype)
    tokenizer = load_tokenizer(folders["target"])
    rows = read_rows(folders["chats"])
    chats = data.split(rows, config.max_length, config.held_out, None if config.reasoning else tokenizer)
    counts = {
        "train": len(chats.train),
        "held_out": len(chats.held_out),
        "too_short": chats.too_short,
        "cut": chats.cut,
    }
    if output:
        output.log.event("chats", **counts)
    every, init = [*chats.train, *chats.held_out], folders.get("init")
    target = load_model(folders["target"], dtype).to(ranks.device)
    model.check_finite(folders["target"], target.named_parameters())
    data.refuse_unknown_tokens(target.get_input_embeddings().num_embeddings, every)
    torch.manual_seed(config.seed)
    drafter = model.read(init) if init else _new(config, target, tokenizer, chats)
    _refuse_another(config, drafter)
    model.attach(drafter, target)
    if init:
        model.check_weights(drafter, init)
    model.check_group(drafter, config.group_size)
    data.refuse_mask_token(drafter.mask_token_id, every)

    with _phase(output, "features"):
        compute = features.TargetFeatures(target, model.taps_of(drafter), final=config.loss == "kl")
        if config.cache_features:
            progress = partial(output.log.progress, what="features") if output else lambda _done, _total: None
            look_up = features.cached(compute, every, scratch / "features.bin", work, progress, ranks)
        else:
            look_up = features.online(compute, every)

    def score(draft: evaluate.Draft) -> dict[str, Any]:
        return evaluate.accept_length(
            draft, chats.held_out, drafter.block_size, config.evaluation_anchors, config.seed, ranks
        )

    def neural() -> dict[str, Any]:
        width = drafter.fc.in_features
        return score(evaluate.neural(drafter, lambda index: look_up(len(chats.train) + index)[:, :width], dtype))

    slots, vocabulary = drafter.block_size - 1, drafter.embed_tokens.num_embeddings
    with _phase(output, "baselines"):
        baselines = {"untrained": neural(), "bigram": score(evaluate.bigram(chats.train, vocabulary, slots))}
    if init:
        model.load_weights(drafter, init)
    schedule = Schedule.of(config)
    trainer = Trainer(drafter, chats.train, look_up, schedule, neural, scratch, work, ranks)

    def moved() -> None:
        if output:
            output.log.progress(trainer.step, trainer.total, what="steps")

    def evaluated(step: int, score: dict[str, Any]) -> None:
        if output:
            output.log.event(
                "evaluated", step=step, accept_length=score["value"], low=score["low"], high=score["high"]
            )

    if trainer.step:
        moved()
    with _phase(output, "training"):
        trainer.run(config.evaluate_every, config.save_every, evaluated, moved)
    if not output:
        return {}
    best = trainer.restore_best()
    model.save(drafter, output.path)
    evaluations = [line for line in trainer.curve if "accept_length" in line]
    scores = {
        **baselines,
        "init": evaluations[0]["accept_length"],
        "final": best["accept_length"],
        "init_is": "the drafter of the init port" if init else "random weights",
        "best_step": best["step"],
        "evaluations": evaluations,
        "definition": evaluate.__doc__,
    }
    (output.path / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    with (output.path / "curve.jsonl").open("w") as lines:
        lines.writelines(json.dumps(line) + "\n" for line in trainer.curve)
    summary = {name: _interval(scores[name]) for name in ("untrained", "bigram", "init", "final")}
    return {
        "accept_length": summary,
        "per_position": best["accept_length"]["per_position"],
        "best_step": best["step"],
        "steps": trainer.step,
        "tokens": trainer.tokens,
        "chats": counts,
        "parameters": sum(weight.numel() for weight in model.trained_parameters(drafter).values()),
        "mask_token": drafter.mask_token_id,
        "taps": model.taps_of(drafter),
    }


def _phase(output: Output | None, name: str) -> AbstractContextManager[None]:
    return output.timed(name) if output else nullcontext()


def _new(
    config: Config, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, chats: data.Split
) -> DFlashDraftModel:
    text = model.text_config(target.config)
    every = [*chats.train, *chats.held_out]
    kept = config.draft_vocabulary
    if kept is not None and kept >= text.vocab_size:
        raise UserError(
            f"draft_vocabulary {kept}: the target has {text.vocab_size} tokens; give fewer, or null for all"
        )
    return model.build(
        target.config,
        layers=config.layers,
        taps=features.target_layer_ids(text.num_hidden_layers, config.taps),
        block_size=config.block_size,
        mask_token=data.choose_mask_token(tokenizer, text.vocab_size, every, config.mask_token),
        window=config.window,
        heads=config.heads,
        key_value_heads=config.key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        draft_tokens=None if kept is None else data.frequent_tokens(chats.train, kept, text.vocab_size),
    )


def _refuse_another(config: Config, drafter: DFlashDraftModel) -> None:
    """Refuse an initial drafter of another architecture than the recipe's; what that leaves open it may choose."""
    layer = drafter.config.transformer_layer_config
    found = {
        "layers": layer.num_hidden_layers,
        "block_size": drafter.block_size,
        "taps": len(model.taps_of(drafter)),
        "window": model.window_of(drafter),
        "draft_vocabulary": None if drafter.t2d is None else drafter.config.draft_vocab_size,
    }
    chosen = {
        "heads": layer.num_attention_heads,
        "key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "intermediate_size": layer.intermediate_size,
        "mask_token": drafter.mask_token_id,
    }
    found |= {name: value for name, value in chosen.items() if getattr(config, name) is not None}
    for name, value in found.items():
        if (asked := getattr(config, name)) != value:
            raise UserError(f"drafter.{name} {asked}: the initial drafter has {value}; say so, or give another one")


def _interval(score: dict[str, Any]) -> dict[str, float]:
    return {key: round(score[key], 5) for key in ("value", "low", "high")} | {"n": score["chats"]}
