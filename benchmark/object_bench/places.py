"""Where objects are kept while they are measured: a directory, and a real S3 API over HTTP."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from obstore.store import LocalStore, S3Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore


_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
# Ends with the process that started it, however that one ends.
_SERVER = """\
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Place:
    """``folder`` gives the URL and a plain store of a new, empty folder. ``directory`` is that of
    the folder, where there is one."""

    name: str
    folder: Callable[[str], tuple[str, ObjectStore]]
    directory: Callable[[str], Path | None]

    def remove(self, name: str) -> None:
        directory = self.directory(name)
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
            return
        _, store = self.folder(name)
        for chunk in store.list(chunk_size=1000):
            store.delete([entry["path"] for entry in chunk])


def directory_place(root: Path) -> Place:
    def folder(name: str) -> tuple[str, ObjectStore]:
        return (root / name).as_uri(), LocalStore(root / name, mkdir=True)

    return Place("directory", folder, lambda name: root / name)


def has_server() -> bool:
    return importlib.util.find_spec("moto") is not None


@contextlib.contextmanager
def s3_place() -> Iterator[Place]:
    """moto's server in a process of its own; the environment leads to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        os.environ.update({**_CREDENTIALS, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint})
        import boto3

        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="benchmark")
        yield Place("s3", lambda name: _s3_folder(endpoint, name), lambda _: None)
    finally:
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()


def _s3_folder(endpoint: str, name: str) -> tuple[str, ObjectStore]:
    store = S3Store(
        "benchmark",
        prefix=name,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=_CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=_CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    return f"s3://benchmark/{name}", store
