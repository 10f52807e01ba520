"""The stages of qdflash, one package each, and the few modules that all stages share.

Run any stage with ``python -m components.<stage> --help``.
"""
