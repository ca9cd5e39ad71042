"""Storage in an object store, by URL. fsspec chooses the client by the scheme: s3fs for s3://.

Credentials come from where the client looks for them: environment variables, files, or the machine's role.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

from adascale_core.checkpoint_manifest import S3_CHECKSUMS, normalized_url
from adascale_core.errors import install_command
from adascale_storage import (
    MissingFileError,
    NameTakenError,
    Part,
    StorageError,
    UnusableStorageError,
    WriteCancelledError,
)

MULTIPART_BYTES = 64 * 2**20
"""Length of the parts of a large object, and the largest object that is written by one request. Parts are
at most 10,000, so an object has at most 640 GB."""

CONDITION_PROBE = "conditional-writes"
"""Name of an empty object, by which it is checked that the store rejects a second object of a name."""

_CREDENTIALS = re.compile("[^/@]*:[^/@]*@")

# Without limits, a server that does not answer would delay the end of a job for many minutes.
_LIMITS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 1}, **S3_CHECKSUMS}
_LIMITS_OF_PERSON = {**_LIMITS, "read_timeout": 15, "retries": {"max_attempts": 0}}
_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": _LIMITS}}
"""Arguments for the clients of URL schemes."""
_OPTIONS_OF_PERSON: dict[str, dict[str, Any]] = {"s3": {"config_kwargs": _LIMITS_OF_PERSON}}
"""The same while a person waits for the answer."""


class ObjectStore:
    """The objects below a URL. An object exists only after its upload is complete.

    Fencing needs a store that can create an object on the condition that none has its name (in S3:
    If-None-Match). The first `write` or `create` checks that.
    """

    def __init__(self, url: str, *, person_waits: bool = False) -> None:
        self._url = normalized_url(url)
        scheme, _, path = url.partition("://")
        if _CREDENTIALS.match(path):
            raise UnusableStorageError(
                f"the URL of the checkpoints contains credentials, which would appear in logs: use {scheme}://"
                f"{_CREDENTIALS.sub('', path)}, and for S3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if not path.strip("/"):
            raise UnusableStorageError(f"{url} has no bucket: use a URL such as {scheme}://bucket/prefix")
        try:
            import fsspec
        except ImportError as error:
            raise _not_installed(url, scheme) from error
        try:
            options = (_OPTIONS_OF_PERSON if person_waits else _OPTIONS).get(scheme, {})
            self._fs, self._prefix = fsspec.core.url_to_fs(self._url, **options)
        except ImportError as error:
            raise _not_installed(url, scheme) from error
        except ValueError as error:
            raise UnusableStorageError(f"{url} cannot be used: {error}") from error
        if scheme == "s3":
            # How often s3fs sends a request, which botocore repeats by itself; 5 if it is not set.
            self._fs.retries = 1 if person_waits else 2
        self._is_checked = False

    def __str__(self) -> str:
        return self._url

    def path(self, name: str) -> str:
        """Return the URL of an object."""
        return f"{self._url}/{name}"

    def names(self) -> list[str]:
        """Return the names of the objects below the URL, without those in deeper folders."""
        with _errors():
            try:
                # `refresh`: clients keep the answers of earlier requests.
                entries = self._fs.ls(self._prefix, detail=False, refresh=True)
            except FileNotFoundError:
                return []
        return [entry.rstrip("/").rpartition("/")[2] for entry in entries]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return a part of an object."""
        with _errors():
            if end is not None and start >= end:
                return b""
            return bytes(self._fs.cat_file(self._key(name), start=start, end=end))

    def write(self, name: str, parts: Iterable[Part], *, size: int) -> None:
        """Upload an object, a large one in several parts."""
        with _errors():
            # Before an upload that could not be committed.
            self._require_conditional_writes()
            if size <= MULTIPART_BYTES:
                self._fs.pipe_file(self._key(name), b"".join(parts))
            else:
                self._upload_in_parts(name, parts)

    def create(self, name: str, content: bytes) -> None:
        """Upload an object on the condition that its name is free."""
        with _errors():
            self._require_conditional_writes()
            self._fs.pipe_file(self._key(name), content, mode="create")

    def delete(self, name: str) -> None:
        """Delete an object if it exists."""
        with _errors(), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._key(name))

    def _upload_in_parts(self, name: str, parts: Iterable[Part]) -> None:
        file = self._fs.open(self._key(name), "wb", block_size=MULTIPART_BYTES)
        try:
            for part in parts:
                file.write(part)
            file.close()
        except BaseException:
            # Otherwise the parts would stay in the bucket. And closing the file, also by the garbage
            # collector, would complete the object.
            with contextlib.suppress(Exception):
                file.discard()
            file.buffer, file.closed = io.BytesIO(), True
            raise

    def _require_conditional_writes(self) -> None:
        """Check once that the store refuses a second object of the same name."""
        if self._is_checked:
            return
        for _ in range(2):
            try:
                self._fs.pipe_file(self._key(CONDITION_PROBE), b"", mode="create")
            except FileExistsError:
                self._is_checked = True
                return
        raise UnusableStorageError(
            f"{self._url}: this store ignores the condition If-None-Match, which keeps a replaced replica "
            "from overwriting checkpoints: use a store with conditional writes"
        )

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raise the errors of clients, which differ, as errors of a storage."""
    try:
        yield
    except (UnusableStorageError, StorageError, WriteCancelledError):
        raise
    except FileExistsError as error:
        raise NameTakenError(_message(error)) from error
    except FileNotFoundError as error:
        raise MissingFileError(_message(error)) from error
    except Exception as error:
        raise StorageError(_message(error)) from error


def _message(error: BaseException) -> str:
    """Return the message of the client's error, which is more specific than the OSError made of it."""
    cause = error.__cause__ or error
    text = str(cause).strip() or str(error).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _not_installed(url: str, scheme: str) -> UnusableStorageError:
    packages = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
    if scheme == "s3":
        remedy = f"run `{install_command('s3')}`"
    else:
        remedy = f"install {packages.get(scheme, 'the fsspec implementation for this scheme')}"
    return UnusableStorageError(
        f"checkpoints cannot be saved at {url}: the client for {scheme}:// is not installed: {remedy}, in "
        "the image of the workers too"
    )
