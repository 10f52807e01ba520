"""Quantization-aware distillation on a frozen grid: an INT4 student learns to predict what its BF16 teacher predicts.

The scales stay as the INT4 checkpoint stores them; only the latents of its quantised linears train, through a
straight-through estimator. The published checkpoints hold exactly the tensors that the forward pass quantised.
"""
