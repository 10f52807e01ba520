"""Run by a Python that has vLLM: generate greedily with a drafter, one prompt alone and eight together.

Writes answers and counters as JSON, and the logits of every draft made while a prompt was alone.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: a third of the start
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


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

    report, logits = {"together": serve(*job["together"]), "alone": []}, []
    forward, compute_logits = Drafter.forward, Drafter.compute_logits

    def seen(self, input_ids, positions, inputs_embeds=None):
        logits.append([len(report["alone"]), int(positions[0])])
        return forward(self, input_ids, positions, inputs_embeds)

    def said(self, hidden_states):
        logits[-1].append(compute_logits(self, hidden_states))
        return logits[-1][-1]

    Drafter.forward, Drafter.compute_logits = seen, said
    for prompt in job["alone"]:
        report["alone"].append(serve(prompt))
    torch.save(logits, sys.argv[3])
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
