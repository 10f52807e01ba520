"""Draws the prompts that models will answer, from files or from a data set at a pinned revision.

The draw is decided by a hash of each row's id, so a larger draw contains a smaller one and shards do not matter. What
was dropped, and why, is counted beside the prompts.
"""
