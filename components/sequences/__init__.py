"""Packs regenerated chats into fixed-length token sequences for distillation.

A row is the token ids that the engine was fed and produced, never re-tokenised text, and rows are split into train
and val by a hash of their id. Sequences, loss masks and document starts are flat files that trainers memory-map.
"""
