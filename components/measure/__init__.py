"""Start one vLLM server on a model or a pair and measure what people decide by.

Suites: greedy answers with their parity against an earlier measurement, acceptance length from the server's counters
beside a bigram drafter's, latency with exact prompts, and quality through lm-eval on local task files. Every figure
carries its number of samples and a 95 % interval; answered items survive a kill and are not asked again. The same
suites measure any server that runs already: `qdflash bench`.
"""
