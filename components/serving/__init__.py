"""Serving a model or a pair: profiles of vLLM arguments, the server process, and a client for it.

``profiles`` and ``arguments`` need pydantic and yaml only, so that the command line, the bundle and the
InferenceService render the same ``vllm serve`` call; ``server`` and ``client`` run where vLLM is installed.
"""
