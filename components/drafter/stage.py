"""The drafter stage: its ports, its knobs, and the order in which its parts run."""

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from components.chats.rows import read_rows
from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig, runtime
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "train"
VERSION = 2
INPUTS = {
    "target": Port("the model folder the drafter drafts for, dense or W4A16"),
    "chats": Port("chats that this target answered (regen)"),
    "init": Port("an earlier drafter to continue from; its architecture, taps and vocabulary are kept", optional=True),
}
OUTPUTS = {
    "config.json": "the drafter's config, in the layout vLLM loads",
    "model.safetensors": "its weights in bfloat16, without the shared embedding and head",
    "curve.jsonl": "loss per step and held-out accept-length per evaluation",
    "scores.json": "accept-length of the untrained, bigram, initial and final drafter, and of every evaluation",
}


class Config(StageConfig):
    """Knobs of the drafter stage."""

    layers: int = Field(5, ge=1, description="Decoder layers of the drafter")
    heads: int | None = Field(None, ge=1, description="Attention heads; null: the target's")
    key_value_heads: int | None = Field(None, ge=1, description="Key/value heads; null: the target's")
    head_dim: int | None = Field(None, ge=8, description="Width of a head; null: the target's")
    intermediate_size: int | None = Field(None, ge=8, description="Width of the MLP; null: the target's")
    block_size: int = Field(16, ge=2, description="Slots of a block: the anchor and block_size − 1 drafted tokens")
    taps: int = Field(5, ge=1, description="Tapped target layers, spread by round(1 + i·(L−4)/(n−1))")
    mask_token: int | None = Field(None, ge=0, description="Mask token id; null: the first id that cannot occur")
    draft_vocabulary: int | None = Field(None, ge=2, description="Drafted tokens kept, by frequency; null: all")
    window: int | None = Field(None, ge=1, description="Attention window in tokens, symmetric; null: full attention")
    group_size: int = Field(128, ge=1, description="Group of the later quantisation, which must divide the widths")
    max_length: int = Field(3072, ge=8, description="Tokens of a conversation that are used")
    reasoning: bool = Field(True, description="Train on the answers' reasoning too; false: it is context only")
    held_out: float = Field(0.02, gt=0, lt=1, description="Share of the chats that are evaluated, not trained on")
    anchors: int = Field(512, ge=1, description="Anchors drawn per conversation and step")
    gamma: float = Field(7.0, gt=0, description="Decay of the slots' loss weights, exp(−(k−1)/γ)")
    loss: Literal["cross_entropy", "kl"] = Field(
        "cross_entropy", description="Learn the stored tokens, or the target's distribution there"
    )
    epochs: int = Field(2, ge=0, description="Passes over the chats")
    batch: int = Field(32, ge=1, description="Conversations per optimiser step")
    learning_rate: float = Field(1e-3, gt=0, description="Peak of the cosine schedule")
    warmup: float = Field(0.04, ge=0, lt=1, description="Share of the steps that warm up")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay on matrices")
    clip: float = Field(1.0, gt=0, description="Largest global gradient norm")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Compute type; weights and moments are float32"
    )
    cache_features: bool = Field(True, description="Compute the target's features once, to disk; false: every time")
    evaluate_every: int = Field(1000, ge=1, description="Steps between evaluations; the best one is handed on")
    evaluation_anchors: int = Field(64, ge=1, description="Anchors per held-out chat, spread evenly")
    seed: int = Field(0, ge=0, description="Seed of weights, order and anchors")
    save_every: int = runtime(200, "Steps between stored training states", ge=1)

    @model_validator(mode="after")
    def _slots_matter(self) -> "Config":
        if self.window is not None and self.window < self.block_size:
            raise ValueError(
                f"window {self.window} is smaller than block_size {self.block_size}: slots would not see each other"
            )
        return self


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Train, evaluate and write the drafter; see ``OUTPUTS`` for the files.

    Raises:
        UserError: chats, target and initial drafter do not fit together, a width the group does not divide, or zero
            training steps.
    """
    import torch

    from components.checkpoint.load import load_model, load_tokenizer
    from components.drafter import data, evaluate, features, model
    from components.drafter.train import Schedule, Trainer

    dtype = getattr(torch, config.dtype)
    target = load_model(inputs["target"].path, dtype)
    tokenizer = load_tokenizer(inputs["target"].path)
    rows = read_rows(inputs["chats"].path)
    chats = data.split(rows, config.max_length, config.held_out, None if config.reasoning else tokenizer)
    counts = {
        "train": len(chats.train),
        "held_out": len(chats.held_out),
        "too_short": chats.too_short,
        "cut": chats.cut,
    }
    output.log.event("chats", **counts)
    every = [*chats.train, *chats.held_out]
    torch.manual_seed(config.seed)
    init = inputs["init"].path if "init" in inputs else None
    drafter = model.read(init) if init else _new(config, target, tokenizer, chats)
    model.attach(drafter, target)
    model.check_group(drafter, config.group_size)
    data.refuse_mask_token(drafter.mask_token_id, every)

    with output.timed("features"):
        compute = features.TargetFeatures(target, model.taps_of(drafter), final=config.loss == "kl")
        if config.cache_features:
            look_up = features.cached(compute, every, output.scratch / "features.bin", output)
        else:
            look_up = features.online(compute, every)

    def score(draft: evaluate.Draft) -> dict[str, Any]:
        return evaluate.accept_length(
            draft, chats.held_out, drafter.block_size, config.evaluation_anchors, config.seed
        )

    def neural() -> dict[str, Any]:
        width = drafter.fc.in_features
        return score(evaluate.neural(drafter, lambda index: look_up(len(chats.train) + index)[:, :width], dtype))

    slots, vocabulary = drafter.block_size - 1, drafter.embed_tokens.num_embeddings
    with output.timed("baselines"):
        baselines = {"untrained": neural(), "bigram": score(evaluate.bigram(chats.train, vocabulary, slots))}
    if init:
        model.load_weights(drafter, init)

    schedule = Schedule(
        epochs=config.epochs,
        batch=config.batch,
        learning_rate=config.learning_rate,
        warmup=config.warmup,
        weight_decay=config.weight_decay,
        clip=config.clip,
        anchors=config.anchors,
        gamma=config.gamma,
        loss=config.loss,
        seed=config.seed,
        dtype=dtype,
    )
    trainer = Trainer(drafter, chats.train, look_up, schedule, neural)
    if trainer.resume(output.work, output.scratch):
        output.log.progress(trainer.state.step, trainer.total, what="steps")

    def save() -> None:
        trainer.save(output.work, output.scratch)
        output.log.progress(trainer.state.step, trainer.total, what="steps")

    with output.timed("training"):
        state = trainer.run(
            config.evaluate_every, config.save_every, save, lambda **fields: output.log.event("evaluated", **fields)
        )
    best = trainer.restore_best()
    model.save(drafter, output.path)
    evaluations = [entry for entry in state.curve if "accept_length" in entry]
    scores = {
        **baselines,
        "init": evaluations[0]["accept_length"],
        "final": best["score"],
        "init_is": "the drafter of the init port" if init else "random weights",
        "best_step": best["step"],
        "evaluations": evaluations,
        "definition": evaluate.__doc__,
    }
    (output.path / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    with (output.path / "curve.jsonl").open("w") as lines:
        lines.writelines(json.dumps(entry) + "\n" for entry in state.curve)
    summary = {name: _interval(scores[name]) for name in ("untrained", "bigram", "init", "final")}
    return {
        "accept_length": summary,
        "per_position": best["score"]["per_position"],
        "best_step": best["step"],
        "steps": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "chats": counts,
        "parameters": sum(weight.numel() for weight in model.trained_parameters(drafter).values()),
        "mask_token": drafter.mask_token_id,
        "taps": model.taps_of(drafter),
    }


def _new(config: Config, target: Any, tokenizer: Any, chats: Any) -> Any:
    from components.drafter import data, features, model

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


def _interval(score: dict[str, Any]) -> dict[str, float]:
    return {key: round(score[key], 5) for key in ("value", "low", "high")}
