"""Post-training quantisation: a BF16 model becomes the INT4 W4A16 checkpoint whose grid distillation keeps.

Scales come from llm-compressor, by plain rounding (no data) or GPTQ (calibrated on regenerated chats).
Every linear is quantised except the output head and what ``ignore`` names; the census goes into the metrics.
"""
