"""``LatePurges``: purges that came before the namespace was known, which names what they mean."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from sglang_tiered.storage.promises import keep, promise

if TYPE_CHECKING:
    from concurrent.futures import Future

    from sglang_tiered.storage.stack import TierStack

__all__ = ["LatePurges"]


class _LatePurge(NamedTuple):
    tenant: bytes | None
    is_remote: bool
    propagate: bool
    is_durable: Future[bool]


class LatePurges:
    """Holds them back until ``begin``. The caller serializes the calls."""

    def __init__(self) -> None:
        self._waiting: list[_LatePurge] = []

    def add(self, tenant: bytes | None, *, is_remote: bool, propagate: bool) -> Future[bool]:
        """Hold back a purge of a tenant, or of all; the future ends as the purge will."""
        late = _LatePurge(tenant, is_remote, propagate, promise())
        self._waiting.append(late)
        return late.is_durable

    def begin(self, stack: TierStack) -> None:
        """Begin all purges that were held back."""
        for tenant, is_remote, propagate, is_durable in self._waiting:
            begun = stack.begin_purge(tenant, is_remote=is_remote, propagate=propagate)
            begun.add_done_callback(partial(_pass_on, is_durable))
        self._waiting.clear()

    def close(self) -> None:
        """End what was held back: no namespace will come."""
        for late in self._waiting:
            keep(late.is_durable, False)


def _pass_on(late: Future[bool], begun: Future[bool]) -> None:
    keep(late, begun.result())
