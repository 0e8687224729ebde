"""Prepares SGLang as a server process does, before any test module imports it."""

from __future__ import annotations

import threading
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from small_cache import make_cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from storages import Storages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns about kernels a CPU does not have
    import sglang.srt.server_args  # noqa: F401 - its import warns too
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The whole cache over a real store, of one rank; whatever it sets in the process is put back.
    The first one of a process takes seconds, for SGLang compiles its hash of pages."""
    from sglang_tiered.config import ENVIRONMENT_VARIABLE
    from sglang_tiered.integration.identity import namespace

    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    monkeypatch.setattr(namespace, "server_identity", None)
    monkeypatch.setattr(namespace, "_files_are_old", False)
    with ExitStack() as held:
        cache = make_cache(str(tmp_path / "kv"), held)
        yield cache
        cache.release_host_resources()


@pytest.fixture
def storages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storages]:
    """Storages of a server with 64 MiB of NVMe, and of others if a test configures them."""
    from storages import Storages

    made = Storages(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads from NVMe wait while it is not set."""
    yield from _held(monkeypatch, "readv", goes_on=True)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes to NVMe wait until it is set."""
    yield from _held(monkeypatch, "writev", goes_on=False)


def _held(patch: pytest.MonkeyPatch, call: str, *, goes_on: bool) -> Iterator[threading.Event]:
    from sglang_tiered.storage.region.device import FileDevice

    event, real = threading.Event(), getattr(FileDevice, call)
    if goes_on:
        event.set()

    def wait_and_go_on(*given: Any) -> int:
        assert event.wait(60)
        return int(real(*given))

    patch.setattr(FileDevice, call, wait_and_go_on)
    yield event
    event.set()
