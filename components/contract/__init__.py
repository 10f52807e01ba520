"""What every stage obeys: one command line, canonical digests, exit codes, log lines.

A stage is a package with a ``stage.py`` that defines ``ROLE``, ``VERSION``, ``INPUTS``, ``OUTPUTS``, ``Config``
and ``run(config, inputs, output) -> metrics``; see :mod:`components.contract.stage`.
"""
