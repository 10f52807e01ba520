"""Trains a DFlash block-diffusion drafter against a target, from random weights or from an earlier drafter.

It learns on the target's own regenerated chats, from the hidden states of a few tapped layers, to fill a whole block
of tokens in one forward. It hands on the checkpoint with the best held-out acceptance, in a folder that vLLM loads.
"""
