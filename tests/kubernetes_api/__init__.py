"""A fake of the Kubernetes API: a real HTTP server on loopback that Kubernetes' own client talks to unmodified.

It keeps objects as an API server does (uid, resourceVersion, generation, managed fields, finalizers, owners), refuses
what one refuses (404, 409, 410, 415, 422; 401 and 403 by token and rights), streams watches and logs, forwards ports,
and holds every write against the kind's schema. What it leaves out: admission webhooks, CEL rules, defaults, JSON
patches, chunked lists, merging lists by key (a list is owned and replaced whole, as in most custom resources); an
unknown field is an error where a real server would by default only warn. It runs nothing: pods and conditions come
from the test, or from the stand-in for controllers in ``controllers``.

    with serving() as api: kubernetes.client.CoreV1Api(api.client())
"""
