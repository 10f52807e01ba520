"""Put a whole run on one self-contained HTML page.

Verdict first, then the table of baseline, target and pair, the curves, the samples side by side and the lineage. It
reads what was committed and never another stage's exit code, so a run whose gate failed has a page too.
"""
