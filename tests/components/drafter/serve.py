"""Run by a Python that has vLLM: generate greedily with a drafter and write tokens and counters as JSON."""

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
    from vllm import LLM, SamplingParams

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
        max_num_seqs=4,
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, logprobs=1)
    outputs = model.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    metrics = {metric.name: metric for metric in model.get_metrics()}
    report = {
        "answers": [list(answer.token_ids) for answer in answers],
        "logprobs": [
            [position[token].logprob for position, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            for answer in answers
        ],
        "drafts": metrics["vllm:spec_decode_num_drafts"].value,
        "accepted": list(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
