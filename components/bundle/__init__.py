"""Target and drafter as one folder that serves.

The target's files lie at the root and the drafter's in ``draft/``, unchanged; beside them the serving profiles, a
model card, the lineage down to the prompts and the checksums. A drafter that does not fit its target is refused.
"""
