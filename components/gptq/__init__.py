"""Quantises a trained DFlash drafter to W4A16 with GPTQ, calibrated on the target's own chats.

Every linear of the drafter (seven a layer, and the projection of the target's features) gets INT4 codes that
compensate each other's rounding on what that linear really sees: one drafter forward per conversation holds all its
blocks, under the training mask. Held-out acceptance is measured before and after, from the folder as written.
"""
