"""Requests to an S3 object store, and what can be wrong with them in one line.

Where the store is and who asks is the environment's to say (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or the machine's role): no credential is ever written anywhere.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from storage.errors import StorageError

if TYPE_CHECKING:
    from obstore.store import S3Store

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REQUEST_TIMEOUT_S = 60
RETRY_TIMEOUT_S = 120
"""How long a request that fails for a passing reason is tried again; a run stops then, and can be resumed."""
PROBE_TIMEOUT_S = 5
METADATA_SERVICES = ("169.254.169.254", "169.254.170.2")
"""Where a machine's role is asked for when the environment names no credentials."""


class AlreadyThere(Exception):
    """A conditional put found an object, or another version of it than it was told to replace."""


@cache
def client() -> Any:
    """The package obstore. Raises StorageError where it is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise StorageError("object stores need the package obstore; pip install 'hybridflow[s3]'")
    return importlib.import_module("obstore")


def connect(bucket: str, *, patient: bool = True) -> S3Store:
    """The bucket's store, one for a bucket and the environment of the time.

    patient: try again for RETRY_TIMEOUT_S; else once, to learn soon whether the store is there.
    """
    settings = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))
    return _connect(bucket, patient, settings, os.getpid())


@cache
def _connect(bucket: str, patient: bool, settings: tuple[tuple[str, str], ...], pid: int) -> S3Store:
    seconds = REQUEST_TIMEOUT_S if patient else PROBE_TIMEOUT_S
    plain = any(value.startswith("http://") for name, value in settings if name in ENDPOINTS)
    store: S3Store = client().store.S3Store(
        bucket,
        client_options={"allow_http": plain, "timeout": f"{seconds}s", "connect_timeout": f"{PROBE_TIMEOUT_S}s"},
        retry_config={
            "max_retries": 10 if patient else 1,
            "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S if patient else PROBE_TIMEOUT_S),
        },
    )
    return store


def endpoint() -> str:
    """The store's address, for people."""
    return next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "Amazon S3")


@contextmanager
def asking(bucket: str, key: str) -> Iterator[None]:
    """Turn the client's errors into ours.

    FileNotFoundError for an object that is not there, AlreadyThere for a condition that does not hold,
    StorageError for everything else: no bucket, no permission, no answer.
    """
    exceptions, url = client().exceptions, f"s3://{bucket}/{key}"
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise _no_bucket(bucket) from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from error
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise AlreadyThere(url) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        code = _code(str(error))
        remedy = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they may do there"
        raise StorageError(f"{url}: {endpoint()} refuses these credentials ({code}); {remedy}") from error
    except exceptions.BaseError as error:
        raise _explained(bucket, url, str(error)) from error


def _explained(bucket: str, url: str, message: str) -> StorageError:
    if "NoSuchBucket" in message:
        return _no_bucket(bucket)
    if any(address in message for address in METADATA_SERVICES):
        return StorageError(f"{url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if "error sending request" in message or "timed out" in message.lower():
        return StorageError(
            f"{url}: {endpoint()} cannot be reached; check AWS_ENDPOINT_URL and the network, then resume: "
            "nothing committed is lost"
        )
    return StorageError(f"{url}: {endpoint()} answers: {_code(message)}")


def _no_bucket(bucket: str) -> StorageError:
    return StorageError(f"s3://{bucket}: there is no such bucket on {endpoint()}; create it, or correct the URL")


def _code(message: str) -> str:
    """The service's own code and sentence, else the first line of the client's."""
    found = re.search(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", message, re.DOTALL)
    if found is None:
        return " ".join(message.partition("\n\nDebug source")[0].split())[:300]
    return " ".join(part for part in found.groups() if part)


def check_reachable(bucket: str, key: str) -> None:
    """Ask once, without patience. Raises StorageError, in seconds, where a run could not read or write there.

    Writing is tried with an object that stays empty, `KEY/.writable`.
    """
    store = connect(bucket, patient=False)
    probe = f"{key}/.writable".lstrip("/")
    with asking(bucket, probe):
        client().put(store, probe, b"")
        client().list_with_delimiter(store, key or None)
