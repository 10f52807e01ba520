"""Draws the prompts that models will answer, from files or from a data set at a pinned revision.

The draw is decided by a hash of each row's id, so a larger draw contains a smaller one and the order of rows and
shards does not matter. Prompts that repeat, that an earlier draw holds, that overlap with what is measured on or that
are too long are dropped; what was dropped, and why, is counted beside the prompts.
"""
