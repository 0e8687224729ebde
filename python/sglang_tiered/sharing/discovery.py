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

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_tiered.sharing.addresses import Target
    from sglang_tiered.sharing.membership import Membership

__all__ = ["Discovery"]

MAX_ADDRESSES = 1024

logger = logging.getLogger(__name__)


class Discovery:
    """Tells ``found`` the addresses whenever it has looked, and whether each name was found by now,
    be it once. ``ports``: those of the ranks to follow, counted from a target's. ``membership`` is
    closed with it."""

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
        self._known: dict[str, list[str]] = {}  # by name
        self._troubles: dict[str, str] = {}
        self._log = OnceLog(logger)
        self._is_closed = threading.Event()
        self.num_failures = 0
        self._thread = threading.Thread(target=self._run, name="tier-peer-discovery", daemon=True)
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why servers may be unknown, as one clause; empty while all is well."""
        return next(iter(self._troubles.values()), "")

    def close(self) -> None:
        """End soon, without waiting for a name that is being resolved. Idempotent."""
        self._is_closed.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        self._look()
        while not self._is_closed.wait(self._every_s):
            self._look()
        if self._membership is not None:
            self._membership.close()

    def _look(self) -> None:
        asks: dict[str, Callable[[], list[str]]] = {
            f"{target.host}:{target.port}": partial(self._resolved, target)
            for target in self._targets
        }
        if self._membership is not None:
            asks["the Redis"] = self._membership.exchange
        known, troubles = {}, {}
        for name, ask in asks.items():
            try:
                known[name] = ask()
                self._log.settle(name)
            except Exception as error:
                self.num_failures += 1
                why = error.strerror if isinstance(error, OSError) else None
                troubles[name] = f"{name} is not found ({why or error})"
                self._log.report(name, "%s; servers that are known already stay so", troubles[name])
                if name in self._known:
                    known[name] = self._known[name]
        self._known, self._troubles = known, troubles
        addresses = dict.fromkeys(each for found in known.values() for each in found)
        self._found(list(addresses)[:MAX_ADDRESSES], known.keys() == asks.keys())

    def _resolved(self, target: Target) -> list[str]:
        return [
            shown_address(host, target.port + port)
            for host in resolve(target.host)
            for port in self._ports
            if target.port + port < 1 << 16
        ]
