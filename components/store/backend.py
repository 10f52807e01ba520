"""One store, two kinds: ``s3://bucket/prefix`` and a plain folder, behaving the same.

Credentials, region and endpoint come from the AWS default chain (``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``,
``AWS_ACCESS_KEY_ID``, profiles, roles). ``QDFLASH_S3_PATH_STYLE=1`` asks for path-style addressing.
"""

import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from components.contract.errors import TransientError, UserError, causes

_UNREACHABLE = (
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "HTTPClientError",
    "ClientConnectorError",
    "ServerTimeoutError",
)
_BUSY = {"InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "500", "502", "503", "504"}


class Store:
    """Objects under one prefix, addressed by slash-separated keys relative to it.

    Every method raises :class:`UserError` for refused credentials, a missing bucket or a full disk, and
    :class:`TransientError` for a store that does not answer; both name the store.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if not self.url or self.url in ("s3:", "file:"):
            raise UserError(f"store {url}: names no bucket or folder")
        if re.match(r"[a-z0-9]+:/(?!/)", self.url):
            raise UserError(f"store {url}: one slash too few; s3://bucket/prefix or a folder is expected")
        if "@" in self.url.partition("://")[2].partition("/")[0]:
            raise UserError("store: its address holds credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        self.is_local = "://" not in self.url or self.url.startswith("file://")
        if self.is_local:
            self.root = str(Path(self.url.removeprefix("file://")).absolute())
            self.fs = fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True)
        elif self.url.startswith("s3://"):
            self.root = self.url.removeprefix("s3://")
            settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
            self.fs = _s3(frozenset(settings.items()), os.environ.get("QDFLASH_S3_PATH_STYLE") == "1", os.getpid())
        else:
            raise UserError(f"store {self.url}: only s3://bucket/prefix and folders are supported")

    def uri(self, key: str) -> str:
        """Return the full address of ``key``."""
        return f"{self.url}/{key}"

    def read(self, key: str, first: int | None = None) -> bytes | None:
        """Return an object's bytes, at most the ``first`` ones, or None when there is no such object."""
        with self._errors(key):
            try:
                return self.fs.cat_file(self._path(key), end=first)
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
        """Put an object only when there is none; return whether this call made it.

        ``data`` must be unique to the caller: after a lost answer the object's bytes tell whose put succeeded.
        """
        with self._errors(key):
            if self.is_local:
                with self._temporary(key) as temporary:
                    temporary.write_bytes(data)
                    try:
                        os.link(temporary, self._path(key))
                    except FileExistsError:
                        return False
                return True
            return self._put_if(key, data, IfNoneMatch="*")

    def replace(self, key: str, expected: bytes, data: bytes) -> bool:
        """Put an object only when it still holds ``expected``; return whether it did."""
        with self._errors(key):
            if self.is_local:
                return self._replace_local(key, expected, data)
            try:
                etag = self.fs.info(self._path(key), refresh=True)["ETag"]
                if self.fs.cat_file(self._path(key)) != expected:
                    return False
            except FileNotFoundError:
                return False
            return self._put_if(key, data, IfMatch=etag)

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
            try:
                self.fs.get_file(self._path(key), str(path))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise UserError(
                    f"{path}: disk full while fetching {self.uri(key)}; free space and run again"
                ) from error

    def size(self, key: str) -> int | None:
        """Return an object's size in bytes, or None when there is no such object."""
        with self._errors(key):
            try:
                return int(self.fs.info(self._path(key))["size"])
            except (FileNotFoundError, NotADirectoryError):
                return None

    def keys(self, prefix: str) -> list[str]:
        """List every object below the folder ``prefix``, sorted; temporary files are not objects."""
        folder = self._path(prefix) if prefix else self.root
        with self._errors(prefix):
            try:
                found = self.fs.find(folder)
            except (FileNotFoundError, NotADirectoryError):
                return []
        cut = len(self.root) + 1
        inside = [path for path in found if path.startswith(f"{folder}/")]
        return sorted(path[cut:] for path in inside if not Path(path).name.startswith(".tmp-"))

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
        with self._errors(prefix):
            path = self._path(prefix)
            if self.is_local:
                if os.path.isdir(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    Path(path).unlink(missing_ok=True)
                return
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(path)
            found = self.fs.find(path)
            bucket = self.root.partition("/")[0]
            for start in range(0, len(found), 1000):
                objects = [{"Key": name.partition("/")[2]} for name in found[start : start + 1000]]
                self.fs.call_s3("delete_objects", Bucket=bucket, Delete={"Objects": objects, "Quiet": True})

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _put_if(self, key: str, data: bytes, **condition: str) -> bool:
        bucket, _, name = self._path(key).partition("/")
        for attempt in range(5):
            try:
                self.fs.call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)
                return True
            except OSError as error:
                codes = _codes(error)
                if codes & {"ConditionalRequestConflict", "OperationAborted"} and attempt < 4:
                    time.sleep(0.2 * 2**attempt)
                    continue
                if codes & {"PreconditionFailed", "412"}:
                    return self.read(key) == data
                if codes & {"NoSuchKey", "404"}:
                    return False
                raise
        return False

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
        if not target.exists():
            return False
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
            translated = self._translate(error, key)
            if translated is None:
                raise
            raise translated from error

    def _translate(self, error: Exception, key: str) -> Exception | None:
        names = {type(cause).__name__ for cause in causes(error)}
        where = f"store {self.url}"
        if names & set(_UNREACHABLE) or isinstance(error, ConnectionError | TimeoutError):
            endpoint = (
                os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "the default AWS one"
            )
            endpoint = re.sub(r"//[^/@]*@", "//", endpoint)  # a password in an address stays out of logs
            return TransientError(f"{where}: no answer from endpoint {endpoint}; is it up? (qdflash store up)")
        if names & {
            "ProfileNotFound",
            "PartialCredentialsError",
            "ConfigParseError",
            "ParamValidationError",
            "SSLError",
        } or (not self.is_local and isinstance(error, ValueError)):
            return UserError(f"{where}: {_first_line(error)}; correct the address or the AWS_* settings")
        if isinstance(error, OSError) and error.errno == errno.EROFS:
            return UserError(f"{where}: read-only; choose another store")
        if "NoCredentialsError" in names:
            return UserError(
                f"{where}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile"
            )
        if not self.is_local and _codes(error) & _BUSY:
            return TransientError(f"{where}: the server failed on {key} ({_first_line(error)}); try again")
        if _codes(error) & {"NoSuchBucket", "InvalidBucketName"}:
            return UserError(
                f"{where}: there is no bucket {self.root.partition('/')[0]}; create it or correct the store's address"
            )
        if isinstance(error, PermissionError):
            return UserError(f"{where}: access to {key} refused; check the credentials and their rights")
        if isinstance(error, FileNotFoundError) and not self.is_local:
            return UserError(f"{where}: {key} not found; does the bucket exist?")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return UserError(f"{where}: disk full while writing {key}; free space and run again")
        return None


@functools.cache
def _s3(_settings: frozenset[tuple[str, str]], path_style: bool, _pid: int) -> Any:
    """One client per process and environment: making one costs half a second."""
    style = "path" if path_style else "auto"
    return fsspec.filesystem(
        "s3",
        use_listings_cache=False,
        skip_instance_cache=True,
        config_kwargs={"s3": {"addressing_style": style}, "connect_timeout": 3, "retries": {"max_attempts": 1}},
    )


def _codes(error: BaseException) -> set[str]:
    """The S3 error codes in an exception's chain."""
    responses = [getattr(cause, "response", None) for cause in causes(error)]
    return {str(response.get("Error", {}).get("Code")) for response in responses if isinstance(response, dict)}


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
