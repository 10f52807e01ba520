"""Write the values with which the chart ``charts/qdflash`` serves a bundle on an accelerator pool.

Reads the bundle's ``serving.yaml`` for every vLLM argument and the gate's verdict for permission. Never memoised: it
runs every time it is asked to.
"""
