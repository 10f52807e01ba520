"""Compare what was measured with what the recipe demands.

The verdict is always committed, met or not, with every rule's value and bound. A gate that is not met ends with exit
code 3, also when the verdict was already there; nothing is deployed then.
"""
