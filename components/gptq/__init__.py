"""Quantises a trained DFlash drafter to W4A16: with GPTQ, calibrated on the target's own chats, or AWQ or rounding.

Every linear of the drafter (seven a layer, and the projection of the target's features) gets INT4 codes, by default
such as make up for each other's rounding on what that linear really sees: one drafter forward a conversation holds all
its blocks, under the training mask. Acceptance and logits are compared before and after, from the folder as written.
"""
