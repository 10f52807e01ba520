"""Model folders as the stages exchange them: dense safetensors and compressed-tensors W4A16 pack-quantized.

Reads and checks both kinds, turns codes and scales into weights and back, loads them as transformers models, and
writes quantised folders that vLLM serves. Scales are always carried exactly as stored; codes are always integers.
"""
