"""The teacher answers the prompts.

Every prompt is rendered once, fed to vLLM as token ids and sampled with a seed of its own; the row keeps the ids that
went in and came out. Finished rows are committed in shards while others are generated, so a killed run continues.
"""
