"""``LatePurges``: purges, and pages to forget, that came before the namespace was known, which
names what they mean."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.storage.promises import keep, promise

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from sglang_tiered.storage.stack import TierStack

__all__ = ["LatePurges"]


class LatePurges:
    """Holds them back until ``begin``. The caller serializes the calls."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[TierStack], Future[bool]], Future[bool]]] = []

    def add(self, tenant: bytes | None, *, is_remote: bool, propagate: bool) -> Future[bool]:
        """Hold back a purge of a tenant, or of all; the future ends as the purge will."""
        return self._hold_back(
            lambda stack: stack.begin_purge(tenant, is_remote=is_remote, propagate=propagate)
        )

    def add_forget(self, keys: list[bytes], *, is_remote: bool) -> Future[bool]:
        """Hold back that pages are forgotten; the future ends as that will."""
        return self._hold_back(lambda stack: stack.forget(keys, is_remote=is_remote))

    def _hold_back(self, act: Callable[[TierStack], Future[bool]]) -> Future[bool]:
        is_durable = promise()
        self._waiting.append((act, is_durable))
        return is_durable

    def begin(self, stack: TierStack) -> None:
        """Begin all that was held back."""
        for act, is_durable in self._waiting:
            act(stack).add_done_callback(partial(_pass_on, is_durable))
        self._waiting.clear()

    def close(self) -> None:
        """End what was held back: no namespace will come."""
        for _, is_durable in self._waiting:
            keep(is_durable, False)


def _pass_on(late: Future[bool], begun: Future[bool]) -> None:
    keep(late, begun.result())
