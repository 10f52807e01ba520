"""What sets artifacts of a stage apart: fields, versions and files of all that each was made from."""

from collections.abc import Sequence

from pydantic import ValidationError

from components.contract.context import is_stored_file
from components.contract.digest import digested
from components.contract.stage import load
from components.store.artifact import Artifact, read_manifest, split_uri
from components.store.backend import Store
from pipelines.why import flat, short


class Lineage:
    """What artifacts were made from, each read once."""

    def __init__(self) -> None:
        self._facts: dict[str, frozenset[str]] = {}

    def apart(self, artifacts: Sequence[Artifact]) -> list[list[str]]:
        """Return for each artifact the facts of its lineage that not all of them share, sorted.

        ``earlier`` are those of an artifact of the same stage that it was made from.
        """
        facts = [self._of(artifact.uri, artifact) for artifact in artifacts]
        shared = frozenset.intersection(*facts) if facts else frozenset()
        return [sorted(one - shared) for one in facts]

    def _of(self, uri: str, artifact: Artifact | None) -> frozenset[str]:
        if uri not in self._facts:
            self._facts[uri] = frozenset(self._tell(artifact)) if artifact else frozenset()
        return self._facts[uri]

    def _tell(self, artifact: Artifact) -> set[str]:
        stage, manifest = artifact.stage, artifact.manifest
        fields = flat(_digested(stage, manifest["config"]))
        facts = {f"{stage}.{path}={short(value)}" for path, value in fields.items()}
        facts.add(f"{stage} version {manifest['version']}")
        if manifest["salt"]:
            facts.add(f"{stage} forced {manifest['salt']}")
        for port, uris in manifest["inputs"].items():
            for uri in uris:
                if is_stored_file(uri):
                    facts.add(f"{stage}.{port} {uri.rsplit('/', 1)[-1]} {uri.rsplit('/', 2)[1][:8]}")
                elif "/" in uri and len(uri.rsplit("/", 1)[-1]) == 64:
                    url, above, digest = split_uri(uri)
                    inherited = self._of(uri, read_manifest(Store(url), above, digest))
                    facts |= {
                        f"earlier {fact}" if fact.startswith((f"{stage}.", f"{stage} ")) else fact
                        for fact in inherited
                    }
        return facts


def _digested(stage: str, config: dict) -> dict:
    """Return a config without its runtime fields; whole when it is of an earlier version."""
    try:
        return digested(load(stage).Config.model_validate(config))
    except ValidationError:
        return config
