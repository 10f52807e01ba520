"""The one place where a model enters: a hub at a pinned revision, a folder, a package, or one made here.

Whatever the source, the result is a folder in safetensors with config, tokenizer, chat template and the token that
ends an answer. Every later stage reads that copy from the store and never reaches for a hub.
"""
