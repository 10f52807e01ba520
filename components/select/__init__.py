"""Chooses one QAD checkpoint by what it predicts on held-out sequences.

Every checkpoint and the untrained start are scored against the teacher on the whole val split; all scores are kept.
Where rows of SciQ, BoolQ, PIQA or HellaSwag are given, their mean accuracy decides, else the lowest KL; the earlier
step wins a tie, and the start itself is never chosen.
"""
