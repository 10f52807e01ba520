"""Run by a Python that has vLLM: generate greedily with a drafter, one prompt alone and eight together.

Writes answers and counters as JSON, what the loaded models are, and the logits of every draft made while a prompt was
alone.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: a third of the start
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


def groups(model: Any) -> dict[str, int | None]:
    """Return the group in which vLLM loaded each linear's codes; None for a dense one."""
    from vllm.model_executor.layers.linear import LinearBase

    linears = {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}
    return {name: getattr(getattr(one, "scheme", None), "group_size", None) for name, one in linears.items()}


def mask(drafter: Any, input_ids: Any, positions: Any, context: dict[int, tuple]) -> list[list[bool]]:
    """Return who sees whom in the loaded drafter's first layer: one row a slot; each context position, then each slot.

    Nothing is read from a config: each context position's features and each slot's input are changed in turn, and a
    slot sees what changes its output.
    """
    import torch

    layer = drafter.model.layers[0]
    hidden = layer.input_layernorm(drafter.embed_input_ids(input_ids))

    def attended(inputs: Any) -> Any:
        return layer.self_attn(positions=positions, hidden_states=inputs).clone()

    def store(position: int, features: Any) -> None:
        slot = context[position][1]
        drafter.model.precompute_and_store_context_kv(features[None], torch.tensor([position]), slot[None])

    plain, columns = attended(hidden), []
    for position in range(int(positions[0])):
        features = context[position][0]
        store(position, features.flip(0))
        columns.append((attended(hidden) != plain).any(-1))
        store(position, features)
    for slot in range(len(positions)):
        other = hidden.clone()
        other[slot] = hidden[slot].flip(0)
        columns.append((attended(other) != plain).any(-1))
    assert torch.equal(attended(hidden), plain)
    return torch.stack(columns, dim=1).tolist()


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM as Drafter

    job = json.loads(Path(sys.argv[1]).read_text())
    model = LLM(
        model=job["target"],
        dtype=job["dtype"],
        speculative_config={"method": "dflash", "model": job["draft"], "num_speculative_tokens": job["slots"]},
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_model_len=256,
        max_num_seqs=8,
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=1)

    def counters() -> list[int]:
        found = {metric.name: metric for metric in model.get_metrics()}
        per_slot = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return [found["vllm:spec_decode_num_drafts"].value, *per_slot]

    def serve(*prompts: list[int]) -> dict:
        before = counters()
        outputs = model.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        drafts, *accepted = (after - one for after, one in zip(counters(), before, strict=True))
        return {
            "answers": [list(answer.token_ids) for answer in answers],
            "logprobs": [
                [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
                for answer in answers
            ],
            "drafts": drafts,
            "accepted": accepted,
        }

    report, logits, context = {"together": serve(*job["together"]), "alone": []}, [], {}
    reads_models = job["dtype"] == "float32"  # in bfloat16 a change of what is seen may round away
    if reads_models:
        report["target_groups"] = model.apply_model(groups)[0]
    forward, compute_logits = Drafter.forward, Drafter.compute_logits
    precompute = Drafter.precompute_and_store_context_kv

    def stored(self, states, positions, slots):
        rows = zip(positions.tolist(), states.clone(), slots.clone(), strict=True)
        context.update((position, (row, slot)) for position, row, slot in rows)
        return precompute(self, states, positions, slots)

    def seen(self, input_ids, positions, inputs_embeds=None):
        logits.append([len(report["alone"]), int(positions[0])])
        if reads_models and "mask" not in report and positions[0] >= job["mask_from"]:
            report["draft_groups"], report["anchor"] = groups(self), int(positions[0])
            report["mask"] = mask(self, input_ids, positions, context)
        return forward(self, input_ids, positions, inputs_embeds)

    def said(self, hidden_states):
        logits[-1].append(compute_logits(self, hidden_states))
        return logits[-1][-1]

    Drafter.forward, Drafter.compute_logits = seen, said
    if reads_models:
        Drafter.precompute_and_store_context_kv = stored
    for prompt in job["alone"]:
        report["alone"].append(serve(prompt))
    torch.save(logits, sys.argv[3])
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
