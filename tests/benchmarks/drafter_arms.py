"""One arm of the study ``drafter-acceptance``, and the held-out acceptance of all of them.

``python drafter_arms.py ARGUMENTS`` is ``python -m components.drafter ARGUMENTS`` but for the target's features: they
are computed before the first step, many conversations a forward, and stay on the device.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from components.chats.rows import read_rows
from components.checkpoint.load import load_model
from components.contract.cli import main
from components.drafter import data, evaluate, features, model

ROWS = 64


def table(compute: features.TargetFeatures, chats: Sequence[data.Chat]) -> features.Features:
    """Compute every conversation's features, those of similar length together; return the look-up by index."""
    found: dict[int, torch.Tensor] = {}
    order = sorted(range(len(chats)), key=lambda index: len(chats[index].token_ids))
    for start in range(0, len(order), ROWS):
        part = order[start : start + ROWS]
        states = compute.batch(pad_sequence([chats[index].token_ids for index in part], batch_first=True))
        for row, index in enumerate(part):
            found[index] = states[row, : len(chats[index].token_ids)].to(torch.bfloat16)
            found[index] = found[index].clone()
    return found.__getitem__


def records(
    draft: evaluate.Draft, chats: Sequence[data.Chat], kinds: dict[str, str], size: int, limit: int
) -> list[dict[str, Any]]:
    """Return each chat's teacher-forced drafts as ``components.measure.acceptance`` counts served ones."""
    found = []
    for index, chat in enumerate(chats):
        score = evaluate.accept_length(lambda _, one, at, index=index: draft(index, one, at), [chat], size, limit)
        accepted = [round(share * score["anchors"]) for share in score["per_position"]]
        found.append({"id": chat.id, "category": kinds[chat.id], "drafts": score["anchors"], "accepted": accepted})
    return found


def score(
    target: Path,
    chats: Path,
    drafters: dict[str, Path],
    config: Any,
    done: Callable[[str, list[dict[str, Any]]], None],
    baselines: bool,
) -> None:
    """Tell ``done`` the :func:`records` of every drafter for ``target`` on the held-out ``chats``.

    With ``baselines`` also those of ``untrained``, the first drafter with random weights, and of ``bigram``, counted
    on the other chats.
    """
    dtype = getattr(torch, config.dtype)
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dense = load_model(target, dtype).to(place)  # type: ignore[arg-type]
    split = data.split(read_rows(chats), config.max_length, config.held_out)
    kinds = {row["id"]: row["category"] for row in read_rows(chats)}
    look_up: features.Features | None = None

    def count(name: str, draft: evaluate.Draft, size: int) -> None:
        done(name, records(draft, split.held_out, kinds, size, config.evaluation_anchors))

    for name, folder in drafters.items():
        torch.manual_seed(config.seed)
        drafter = model.attach(model.read(folder), dense)
        size = drafter.block_size
        if look_up is None:
            look_up = table(features.TargetFeatures(dense, model.taps_of(drafter)), split.held_out)
            if baselines:
                count("untrained", evaluate.neural(drafter, look_up, dtype), size)
                count("bigram", evaluate.bigram(split.train, drafter.embed_tokens.num_embeddings, size - 1), size)
        model.load_weights(drafter, folder)
        count(name, evaluate.neural(drafter, look_up, dtype), size)


if __name__ == "__main__":
    features.online = table
    raise SystemExit(main("drafter"))
