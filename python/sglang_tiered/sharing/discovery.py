"""``Discovery``: at which addresses other servers are. A thread of its own, as names are slow.

Names are resolved again every few seconds, to all their addresses; with a Redis, servers name
themselves there (``membership``). What cannot be found out is asked again, and what was known
before stays: no name and no Redis ever ends a server.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.sharing.addresses import resolve, shown_address
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.promises import Promises, keep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.sharing.addresses import Target
    from sglang_tiered.sharing.membership import Membership

__all__ = ["Discovery"]

MAX_ADDRESSES = 1024
_INDEX = "the Redis"

logger = logging.getLogger(__name__)


class Discovery:
    """Tells ``found`` the addresses whenever it has looked, and whether each name was found by now,
    be it once. ``ports`` are added to a target's
    port: those of the ranks to follow. ``membership`` is closed with it."""

    def __init__(
        self,
        targets: Sequence[Target],
        ports: Sequence[int],
        *,
        membership: Membership | None,
        found: Callable[[list[str], bool], None],
        every_s: float,
    ) -> None:
        self._targets = targets
        self._ports = ports
        self._membership = membership
        self._found = found
        self._every_s = every_s
        self._known: dict[str, list[str]] = {}  # by target or index
        self._troubles: dict[str, str] = {}
        self._log = OnceLog(logger)
        self._promises = Promises()
        self._asked: list[Future[bool]] = []
        self._wakes = threading.Condition()
        self._is_closed = False
        self._is_awaited = True
        self.num_failures = 0
        self._thread = threading.Thread(target=self._run, name="tier-peer-discovery", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why servers may be unknown, as one clause; empty while all is well."""
        return next(iter(self._troubles.values()), "")

    @property
    def num_known(self) -> int:
        return sum(map(len, self._known.values()))

    def look(self) -> Future[bool]:
        """Look again now. True once that succeeded."""
        promise = self._promises.make()
        with self._wakes:
            self._asked.append(promise)
            self._is_awaited = True
            self._wakes.notify()
        return promise

    def close(self) -> None:
        """End soon, without waiting for a name that is being resolved. Idempotent."""
        with self._wakes:
            self._is_closed = True
            self._wakes.notify()
        self._promises.close()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_closed or self._is_awaited, self._every_s)
                if self._is_closed:
                    break
                asked, self._asked = self._asked, []
                self._is_awaited = False
            works = self._look()
            for promise in asked:
                keep(promise, works)
        if self._membership is not None:
            self._membership.close()

    def _look(self) -> bool:
        works = True
        named = {f"{host}:{port}" for host, port in self._targets} | {_INDEX}
        gone = self._known.keys() - named
        for name in gone:
            del self._known[name]
        for name in self._troubles.keys() - named:
            del self._troubles[name]
        for target in self._targets:
            works &= self._try(f"{target.host}:{target.port}", partial(self._resolved, target))
        if self._membership is not None:
            works &= self._try(_INDEX, self._membership.exchange)
        addresses = dict.fromkeys(each for found in self._known.values() for each in found)
        if self._membership is None:
            named.discard(_INDEX)
        self._found(list(addresses)[:MAX_ADDRESSES], named <= self._known.keys())
        return works

    def _resolved(self, target: Target) -> list[str]:
        return [
            shown_address(host, target.port + port)
            for host in resolve(target.host)
            for port in self._ports
            if target.port + port < 1 << 16
        ]

    def _try(self, name: str, ask: Callable[[], list[str]]) -> bool:
        try:
            found = ask()
        except Exception as error:
            self.num_failures += 1
            why = error.strerror if isinstance(error, OSError) else None
            clause = f"{name} is not found ({why or error})"
            self._troubles[name] = clause
            self._log.report(name, "%s; servers that are known already stay so", clause)
            return False
        self._known[name] = found
        self._troubles.pop(name, None)
        self._log.settle(name)
        return True
