"""A tiny Qwen3.5 model, made and trained here: the hybrid of GDN and full attention at a size that a laptop trains.

Same architecture class, chat template conventions and tied head as Qwen3.5-4B, so every stage meets the real thing's
structure: linear attention with a causal convolution, gated full attention, partial rotary embedding, ``<think>``
blocks. One token is reserved as a drafter's mask.
"""

import io
import itertools
from pathlib import Path
from typing import Any

from components.contract.context import Output
from components.model.corpus import Chat, chats

PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
LENGTH = 96
CHECKPOINT_STEPS = 50
HELD_OUT_SEED_OFFSET = 1_000_003
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' and loop.last %}
{{- '<think>\\n' + (message['reasoning_content'] or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def make(source: Any, folder: Path, output: Output) -> dict[str, float]:
    """Build, train and save the model; return held-out loss (nats a token) and the share of right answers."""
    import torch

    torch.manual_seed(source.seed)
    tokenizer = build_tokenizer(source.vocab_size, source.seed)
    model = build_model(source, tokenizer)
    train(model, tokenizer, source, output)
    model.to(torch.bfloat16)
    measures = examine(model, tokenizer, source.seed + HELD_OUT_SEED_OFFSET)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return measures


def build_tokenizer(vocab_size: int, seed: int) -> Any:
    """Return a byte-level BPE tokenizer of at most ``vocab_size`` tokens, learned from the corpus."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, START, END, MASK]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = itertools.islice(chats(seed), 4000)
    bpe.train_from_iterator((f"system user assistant\n {chat.question}\n {chat.answer}" for chat in sample), trainer)
    bpe.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=PAD, mask_token=MASK, additional_special_tokens=[START]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(source: Any, tokenizer: Any) -> Any:
    """Return an untrained Qwen3.5 text model; its vocabulary is padded to a multiple of 64."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=source.hidden_size,
        intermediate_size=3 * source.hidden_size,
        num_hidden_layers=source.layers,
        layer_types=["full_attention" if index % 2 else "linear_attention" for index in range(source.layers)],
        num_attention_heads=source.hidden_size // 64,
        num_key_value_heads=max(1, source.hidden_size // 128),
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=source.hidden_size // 128,
        linear_num_value_heads=source.hidden_size // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        mamba_ssm_dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def train(model: Any, tokenizer: Any, source: Any, output: Output) -> None:
    """Train in fp32 with AdamW on the answers' tokens; resumes from the newest stored state, bit for bit."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=source.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=source.learning_rate, total_steps=source.steps, pct_start=0.1
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = 0
    if (data := output.work.get("training.pt")) is not None:
        state = torch.load(io.BytesIO(data), weights_only=True)
        first = state.pop("step")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        output.log.progress(first, source.steps)
    model.train()
    stream = itertools.islice(chats(source.seed), first * source.batch, None)
    for step in range(first + 1, source.steps + 1):
        ids, labels = batch(tokenizer, list(itertools.islice(stream, source.batch)))
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % CHECKPOINT_STEPS == 0 and step < source.steps:
            buffer = io.BytesIO()
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"step": step}, buffer)
            output.work.put("training.pt", buffer.getvalue())
            output.log.progress(step, source.steps, loss=loss.item())
    output.log.progress(source.steps, source.steps)
    model.eval()


def batch(tokenizer: Any, rows: list[Chat]) -> tuple[Any, Any]:
    """Return token ids and labels, both int64 [rows, length]; prompt and padding have label -100."""
    import torch

    encoded = tokenizer([text(tokenizer, chat) for chat in rows], add_special_tokens=False)["input_ids"]
    prompts = tokenizer([prompt(tokenizer, chat) for chat in rows], add_special_tokens=False)["input_ids"]
    width = max(map(len, encoded))
    if width > LENGTH:
        raise AssertionError(f"a chat of {width} tokens; the corpus must fit {LENGTH}")
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for row, tokens in enumerate(encoded):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        answer = slice(len(prompts[row]), len(tokens))
        labels[row, answer] = ids[row, answer]
    return ids, labels


def prompt(tokenizer: Any, chat: Chat) -> str:
    """Return the chat's prompt as the served model will see it."""
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": chat.question}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=chat.thought is not None,
    )


def text(tokenizer: Any, chat: Chat) -> str:
    """Return prompt and answer, end token included."""
    thought = "" if chat.thought is None else f"{chat.thought}\n</think>\n\n"
    return f"{prompt(tokenizer, chat)}{thought}{chat.answer}{END}"


def examine(model: Any, tokenizer: Any, seed: int, count: int = 128) -> dict[str, float]:
    """Return the loss on held-out chats and the share of questions answered exactly right by greedy decoding.

    Greedy decoding gives the whole answer if and only if every token of it is the most likely one after the right
    tokens before it, so one forward pass tells.
    """
    import torch

    model.eval()
    rows = list(itertools.islice(chats(seed), count))
    ids, labels = batch(tokenizer, rows)
    with torch.no_grad():
        result = model(input_ids=ids, labels=labels, use_cache=False)
    right = 0
    for row, chat in enumerate(rows):
        start = len(tokenizer(prompt(tokenizer, chat), add_special_tokens=False)["input_ids"])
        end = len(tokenizer(text(tokenizer, chat), add_special_tokens=False)["input_ids"])
        right += bool((result.logits[row, start - 1 : end - 1].argmax(-1) == ids[row, start:end]).all())
    return {"held_out_loss": result.loss.item(), "right_answers": right / count}
