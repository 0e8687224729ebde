"""A real S3 API over HTTP in a process of its own (moto's server), and faults on the way to it.

The same server serves every test of a session; tests keep apart by their buckets.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import subprocess
import sys
from functools import cached_property
from typing import Any

import boto3
from botocore.config import Config

HOST = "127.0.0.1"
REGION = "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}
_TIMEOUT_S = 60.0
# It ends with the process that started it, however that one ends.
_PROGRAM = f"""\
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer({HOST!r}, 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


def s3_environment(endpoint: str) -> dict[str, str]:
    """What a user of S3 sets: who he is, where, and that this server speaks plain HTTP."""
    return {
        **CREDENTIALS,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class ObjectServer:
    """Starts the server and waits until it listens; ends it by its process id."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        environment = {n: v for n, v in os.environ.items() if not n.startswith("AWS_")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a line for every request
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        ready, _, _ = select.select([self._stdout], [], [], _TIMEOUT_S)
        said = self._stdout.readline() if ready else b""
        if not said.strip().isdigit():
            self._process.kill()
            raise RuntimeError("moto's server did not start")
        self.address = (HOST, int(said))

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @cached_property
    def client(self) -> Any:
        """boto3's client: the tests' own look at a bucket, beside the code under test."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
        )

    def make_bucket(self) -> str:
        """A new, empty bucket; its name."""
        name = f"bucket-{next(self._numbers)}"
        self.client.create_bucket(Bucket=name)
        return name

    def pause(self) -> None:
        """The server stops answering, with its connections open, as a stalled host does."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait(_TIMEOUT_S)
        self._stdin.close()
        self._stdout.close()

    def __enter__(self) -> ObjectServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
