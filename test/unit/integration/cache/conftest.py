"""A cache over SGLang's own tree and pools and a real store, of whatever kind a test wants."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from cache_world import cache_world

from sglang_tiered.storage.region.device import FileDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cache_world import CacheWorld


@pytest.fixture
def open_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., CacheWorld]]:
    """``open_world(has_window=True)``, once in a test: see ``cache_world``."""
    with ExitStack() as held:
        yield lambda **kind: held.enter_context(cache_world(tmp_path / "kv", monkeypatch, **kind))


@pytest.fixture
def world(open_world: Callable[..., CacheWorld]) -> CacheWorld:
    return open_world()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reads wait while it is not set."""
    disk, readv = threading.Event(), FileDevice.readv
    disk.set()

    def wait_and_read(*given: Any) -> int:
        assert disk.wait(60)
        return readv(*given)

    monkeypatch.setattr(FileDevice, "readv", wait_and_read)
    yield disk
    disk.set()
