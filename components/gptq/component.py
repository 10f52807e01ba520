"""The ``gptq`` stage as a KFP container component, for this pipeline and for anyone's.

``component(image, argv)`` is a KFP component; :func:`components.contract.invocation.invocation` makes the argv.
"""

from functools import partial

from components.contract.container import container_component

component = partial(container_component, "gptq")
