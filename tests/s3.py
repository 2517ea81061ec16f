"""A local S3 server, and the environment that leads to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest

BUCKET = "runs"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server(address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a server with one bucket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address=address, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        httpx.put(f"{url}/{BUCKET}").raise_for_status()
        yield url
    finally:
        server.stop()


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """The process's environment with these variables and no other AWS ones."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in changes.items():
            patch.setenv(name, value)
        yield
