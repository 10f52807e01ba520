"""What a stage's command line takes: its parser, and what ``--config``, ``--input`` and ``--output`` mean."""

import argparse
import json
import re
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from components.contract.context import Input, Inputs, is_stored_file
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.faults import explain
from components.contract.stage import Stage
from components.store.artifact import beginning_with, split_uri
from components.store.backend import Store

_SHORT = re.compile(r"(?P<store>.+)/(?P<stage>[^/]+)/(?P<start>[0-9a-f]{1,63})", re.DOTALL)


def parse_config(module: Stage, text: str) -> StageConfig:
    """Read ``--config``: JSON, or the path or s3:// address of a JSON file."""
    if not text.lstrip().startswith("{"):
        folder, _, name = text.rpartition("/")
        data = Store(folder or ".").read(name)
        if data is None:
            raise UserError(f"--config {text}: no such file")
        text = data.decode(errors="replace")
    try:
        return module.Config.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"--config: {'; '.join(explain(error, module.Config))}") from error


def parser(stage: str, module: Stage) -> argparse.ArgumentParser:
    """Return the parser of a stage; its help lists the stage's ports and config fields."""
    ports = "\n".join(
        f"  {name:<15} {port.doc}{' (optional)' if port.optional else ''}{' (repeatable)' if port.many else ''}"
        for name, port in module.INPUTS.items()
    )
    fields = "\n".join(f"  {name:<23} {_field_help(field)}" for name, field in module.Config.model_fields.items())
    made = argparse.ArgumentParser(
        prog=f"python -m components.{stage}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"inputs:\n{ports or '  none'}\n\nconfig fields:\n{fields or '  none'}",
        epilog=_by_hand(stage, module),
    )
    made.add_argument("--config", required=True, help="the stage's config as JSON, or the address of a JSON file")
    made.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=URI",
        help="bind an input: a file, or an artifact's address, whose digest may be cut short; repeatable",
    )
    made.add_argument(
        "--output",
        required=True,
        metavar="PREFIX",
        help="<store>/<stage>/<digest>; <store>/<stage>/ leaves the digest to the stage",
    )
    made.add_argument("--salt", help="set by a forced re-run; part of the digest")
    made.add_argument("--executor-output", metavar="PATH", help="where to write the KFP ExecutorOutput JSON")
    made.add_argument(
        "--executor-artifact",
        action="append",
        default=[],
        nargs=3,
        metavar=("NAME", "PATH", "URI"),
        help="one of KFP's outputs: its name, where to write it, and the address KFP gives it; repeatable",
    )
    return made


def _by_hand(stage: str, module: Stage) -> str:
    ports = [name for name, port in module.INPUTS.items() if not port.optional]
    lines = [f"python -m components.{stage} --config '{{…}}'"]
    lines += [f"--input {name}=$QDFLASH_STORE/STAGE/DIGEST" for name in ports]
    lines += [f"--output $QDFLASH_STORE/{stage}/"]
    command = " \\\n    ".join(lines)
    return f'by hand (qdflash artifacts list shows digests):\n  eval "$(qdflash store env --secret)"\n  {command}'


def _field_help(field: FieldInfo) -> str:
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    kind = kind.replace("typing.", "")
    default = (
        "required"
        if field.is_required()
        else f"default {json.dumps(to_jsonable_python(field.get_default(call_default_factory=True)))}"
    )
    return f"{field.description or ''} ({kind}, {default})"


def store_of(output: str, stage: str, digest: str) -> str:
    """Return the store in ``--output``, which names the stage and, unless it ends in a slash there, the digest.

    Raises :class:`UserError` when the digest is not ``digest``.
    """
    if output.endswith(f"/{stage}/"):
        return output.removesuffix(f"/{stage}/")
    store_url, *named = split_uri(output)
    if named != [stage, digest]:
        raise UserError(
            f"--output {output}: this config and these inputs give {stage}/{digest}; planner and stage are of "
            f"different versions, or the address is wrong; STORE/{stage}/ leaves the digest to the stage"
        )
    return store_url


def _whole(uri: str) -> str:
    """Complete the address of an artifact whose digest is cut short; any other address stays as it is."""
    short = _SHORT.fullmatch(uri)
    if not short or is_stored_file(uri) or Path(uri).exists():
        return uri
    found = beginning_with(Store(short["store"]), short["stage"], short["start"])
    if len(found) != 1:
        why = f"{len(found)} artifacts begin so; give more digits" if found else "no such file or artifact"
        raise UserError(f"input {uri}: {why}")
    return found[0].uri


def bind(module: Stage, pairs: list[str]) -> Inputs:
    """Bind ``NAME=URI`` pairs to the stage's ports.

    Raises :class:`UserError` for an unknown port, one that is missing or given too often, or a digest cut too short.
    """
    bound: dict[str, list[Input]] = {}
    for pair in pairs:
        name, separator, uri = pair.partition("=")
        if not separator or name not in module.INPUTS:
            raise UserError(f"--input {pair}: expected NAME=URI with NAME one of {', '.join(module.INPUTS)}")
        bound.setdefault(name, []).append(Input(_whole(uri)))
    for name, port in module.INPUTS.items():
        count = len(bound.get(name, []))
        if count == 0 and not port.optional:
            raise UserError(f"--input {name}=…: missing; it is {port.doc}")
        if count > 1 and not port.many:
            raise UserError(f"--input {name}=…: given {count} times, takes one")
    return Inputs(bound)
