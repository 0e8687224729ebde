"""What happens just before or behind chosen requests of an engine, or in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kit.waiting import TIMEOUT_S
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.bucket.requests import BucketError, Failure


def before(
    engine: BucketEngine, kind: str, act: Callable[[], object], of: str = "", times: int = 1
) -> list[str]:
    """Act before the next requests of a kind for what has ``of`` in its path, and in their place if
    that raises. Returns the paths of all that were asked, in a list that grows."""
    inner, asked, left = getattr(engine._requests, kind), list[str](), [times]

    def call(path: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(str(path))
        if of in str(path) and left[0]:
            left[0] -= 1
            act()
        return inner(path, *arguments, **named)

    setattr(engine._requests, kind, call)
    return asked


def refuse() -> None:
    raise BucketError(Failure.UNAVAILABLE, "put was answered with status 503")


class Gate:
    def __init__(self, engine: BucketEngine, kind: str, of: str = "", times: int = 1 << 30) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        before(engine, kind, self._wait, of, times)

    def _wait(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIMEOUT_S), "the gate stayed closed"


def listed(engine: BucketEngine, folder: str) -> list[str]:
    return [each.path for chunk in engine._requests.listing(folder) for each in chunk]
