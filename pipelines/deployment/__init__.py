"""From a gated bundle to a service in a namespace, and back out when it does not serve as it was measured.

``api`` speaks to the cluster, ``chart`` renders the objects, ``evidence`` says what was measured, ``preflight`` looks
before anything changes, ``lock`` lets one deploy at a time, ``waiting`` explains why pods are not ready, ``smoke``
calls the service, ``counters`` reads what it counted,
``record`` keeps revisions, and ``rollout`` puts them in order.
"""
