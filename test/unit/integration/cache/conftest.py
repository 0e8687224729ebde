"""A cache over SGLang's own tree and pools and a real store, of whatever kind a test wants."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from cache_world import cache_world

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
