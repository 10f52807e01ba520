"""Packing: the selected distillation checkpoint becomes the W4A16 target that is served.

Codes are computed once, in fp32, from the tensors that the training forward quantised; scales are the student's bytes.
Census, scales, codes and the reloaded model's logits are proved before anything is committed.
"""
