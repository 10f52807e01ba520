"""One store, two kinds: ``s3://bucket/prefix`` and a plain folder, behaving the same.

Credentials, region and endpoint come from the AWS default chain (``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, profiles, roles). ``QDFLASH_S3_PATH_STYLE=1`` asks for path-style addressing.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from components.contract.errors import TransientError, UserError

_UNREACHABLE = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "HTTPClientError",
    "ClientConnectorError",
    "ServerTimeoutError",
)


class Store:
    """Objects under one prefix, addressed by slash-separated keys relative to it.

    Every method raises :class:`UserError` for refused credentials, a missing bucket or a full disk, and
    :class:`TransientError` for a store that does not answer; both name the store.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.is_local = "://" not in self.url or self.url.startswith("file://")
        if self.is_local:
            self.root = str(Path(self.url.removeprefix("file://")).absolute())
            self.fs = fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)
        elif self.url.startswith("s3://"):
            self.root = self.url.removeprefix("s3://")
            self.fs = _s3()
        else:
            raise UserError(f"store {self.url}: only s3://bucket/prefix and folders are supported")

    def uri(self, key: str) -> str:
        """Return the full address of ``key``."""
        return f"{self.url}/{key}"

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes, or None when there is no such object."""
        with self._errors(key):
            try:
                return self.fs.cat_file(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def write(self, key: str, data: bytes) -> None:
        """Put an object whole; a reader sees the old bytes or the new, never a part."""
        with self._errors(key):
            if self.is_local:
                with self._temporary(key) as temporary:
                    temporary.write_bytes(data)
                    os.replace(temporary, self._path(key))
            else:
                self.fs.pipe_file(self._path(key), data)

    def create(self, key: str, data: bytes) -> bool:
        """Put an object only when there is none; return whether this call made it."""
        with self._errors(key):
            if self.is_local:
                with self._temporary(key) as temporary:
                    temporary.write_bytes(data)
                    try:
                        os.link(temporary, self._path(key))
                    except FileExistsError:
                        return False
                return True
            try:
                self.fs.pipe_file(self._path(key), data, mode="create")
            except OSError as error:
                if _is_precondition(error):
                    return False
                raise
            return True

    def replace(self, key: str, expected: bytes, data: bytes) -> bool:
        """Put an object only when it still holds ``expected``; return whether it did."""
        with self._errors(key):
            if self.is_local:
                return self._replace_local(key, expected, data)
            bucket, _, name = self._path(key).partition("/")
            etag = f'"{hashlib.md5(expected, usedforsecurity=False).hexdigest()}"'
            try:
                self.fs.call_s3("put_object", Bucket=bucket, Key=name, Body=data, IfMatch=etag)
            except OSError as error:
                if _is_precondition(error):
                    return False
                raise
            return True

    def upload(self, path: Path, key: str) -> None:
        """Stream a local file to ``key`` (multipart above 50 MB on S3)."""
        with self._errors(key):
            if self.is_local:
                with self._temporary(key) as temporary:
                    self.fs.put_file(str(path), str(temporary))
                    os.replace(temporary, self._path(key))
            else:
                self.fs.put_file(str(path), self._path(key))

    def download(self, key: str, path: Path) -> None:
        """Stream an object to a local file."""
        with self._errors(key):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.fs.get_file(self._path(key), str(path))

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes, or None when there is no such object."""
        with self._errors(key):
            try:
                return int(self.fs.info(self._path(key))["size"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    def keys(self, prefix: str) -> list[str]:
        """List every object below the folder ``prefix``, sorted; temporary files are not objects."""
        with self._errors(prefix):
            try:
                found = self.fs.find(self._path(prefix))
            except (FileNotFoundError, NotADirectoryError):
                return []
        cut = len(self.root) + 1
        return sorted(path[cut:] for path in found if not Path(path).name.startswith(".tmp-"))

    def folders(self, prefix: str) -> list[str]:
        """List the names of the folders directly below ``prefix``, sorted."""
        with self._errors(prefix):
            try:
                entries = self.fs.ls(self._path(prefix) if prefix else self.root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory")

    def delete(self, prefix: str) -> None:
        """Remove an object, or every object below a folder; nothing there is no error."""
        with self._errors(prefix), contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._path(prefix), recursive=True)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[Path]:
        target = Path(self._path(key))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".tmp-{uuid.uuid4().hex}")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def _replace_local(self, key: str, expected: bytes, data: bytes) -> bool:
        target = Path(self._path(key))
        lock = target.with_name(f".tmp-lock-{target.name}")
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not target.exists() or target.read_bytes() != expected:
                return False
            with self._temporary(key) as temporary:
                temporary.write_bytes(data)
                os.replace(temporary, target)
            return True

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except (UserError, TransientError):
            raise
        except Exception as error:
            raise self._translate(error, key) from error

    def _translate(self, error: Exception, key: str) -> Exception:
        names = {type(cause).__name__ for cause in _chain(error)}
        where = f"store {self.url}"
        if names & set(_UNREACHABLE) or isinstance(error, ConnectionError | TimeoutError):
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "the default AWS one"
            return TransientError(f"{where}: no answer from endpoint {endpoint}; is it up? (qdflash store up)")
        if "NoCredentialsError" in names:
            return UserError(f"{where}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile")
        if isinstance(error, PermissionError):
            return UserError(f"{where}: access to {key} refused; check the credentials and their rights")
        if isinstance(error, FileNotFoundError) and not self.is_local:
            return UserError(f"{where}: {key} not found; does the bucket exist?")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return UserError(f"{where}: disk full while writing {key}; free space and run again")
        return error


def _s3() -> Any:
    style = "path" if os.environ.get("QDFLASH_S3_PATH_STYLE") == "1" else "auto"
    return fsspec.filesystem(
        "s3",
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={"s3": {"addressing_style": style}, "connect_timeout": 5, "retries": {"max_attempts": 2}},
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_precondition(error: OSError) -> bool:
    codes = {str(getattr(cause, "response", {}).get("Error", {}).get("Code")) for cause in _chain(error)}
    return bool(codes & {"PreconditionFailed", "412", "NoSuchKey", "404"})
