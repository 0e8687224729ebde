"""``PeerSync``: what this server and the others know of each other: pages, and erasures.

It holds what followers of this server are told, and follows the others. It has a thread that waits
for what may take long: the store that erases what others told, and the disk.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.sharing.erasures import ErasureBook
from sglang_tiered.sharing.following import Follower
from sglang_tiered.sharing.mirror import Mirror
from sglang_tiered.sharing.settings import resolve
from sglang_tiered.sharing.telling import Followers, Holdings
from sglang_tiered.storage.backoff import OnceLog
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.jobs import call_each
from sglang_tiered.storage.promises import ended, keep, keep_as, promise
from sglang_tiered.wire.sockets import endpoint_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from sglang_tiered.sharing.membership import Membership
    from sglang_tiered.sharing.pages.messages import ErasureNotice
    from sglang_tiered.sharing.pages.server import PageServer
    from sglang_tiered.sharing.settings import PageSettings, PeerSettings, Target
    from sglang_tiered.sharing.telling import Held
    from sglang_tiered.storage.region.engine import RegionEngine
    from sglang_tiered.wire.keys import Keys

    EraseWanted = Callable[[Erasure], Future[bool]]


logger = logging.getLogger(__name__)

_MAX_TOLD = 65_536  # erasures that wait to be applied; beyond it they are told again
_IDLE_PART = 10  # times what looking takes of the processor lies between two looks
_JOIN_S = 5.0
_REDIS = "the Redis"

MAX_ADDRESSES = 1024


class PeerDiscovery:
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
        self._asked: dict[str, Future[list[str]]] = {}  # by name, until it is answered
        self._known: dict[str, list[str]] = {}
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
        left_s = 0.0
        while not self._is_closed.wait(left_s):
            begun = time.monotonic()
            self._look()
            # What waiting for a slow name took is part of it: a record here expires.
            left_s = max(0.0, self._every_s - (time.monotonic() - begun))
        if self._membership is not None:
            # One under way would name this server again, behind its leave.
            wait([each for name, each in self._asked.items() if name == _REDIS], _JOIN_S)
            self._membership.close()

    def _look(self) -> None:
        asks: dict[str, Callable[[], list[str]]] = {
            f"{target.host}:{target.port}": partial(self._resolved, target)
            for target in self._targets
        }
        if self._membership is not None:
            asks[_REDIS] = self._membership.exchange
        for name, ask in asks.items():
            if name not in self._asked:
                (self._asked[name],) = call_each(lambda ask: ask(), [ask], 1)
        wait(self._asked.values(), self._every_s)  # a slow name keeps no other from being asked
        troubles = self._troubles.copy()
        for name in [name for name, answer in self._asked.items() if answer.done()]:
            try:
                self._known[name] = self._asked.pop(name).result()
                troubles.pop(name, None)
                self._log.settle(name)
            except Exception as error:
                self.num_failures += 1
                why = error.strerror if isinstance(error, OSError) else None
                troubles[name] = f"{name} is not found ({why or error})"
                self._log.report(name, "%s; servers that are known already stay so", troubles[name])
        self._known = {name: self._known[name] for name in asks if name in self._known}
        self._troubles = {name: troubles[name] for name in asks if name in troubles}
        addresses = dict.fromkeys(each for found in self._known.values() for each in found)
        self._found(list(addresses)[:MAX_ADDRESSES], self._known.keys() == asks.keys())

    def _resolved(self, target: Target) -> list[str]:
        return [
            endpoint_of(host, target.port + port)
            for host in resolve(target.host)
            for port in self._ports
            if target.port + port < 1 << 16
        ]


class PeerSync:
    """``erase`` hides what another server erased before it returns, spreads nothing and may block;
    its future is true once that is durable. Call ``start`` once there is a server that tells
    ``followers`` of this, and ``close`` before it is stopped. Every method of any thread."""

    def __init__(
        self,
        settings: PeerSettings,
        *,
        namespace: bytes,
        held: Held,
        erase: EraseWanted,
        notes: RegionEngine | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._erase = erase
        self._held = held
        self.book = ErasureBook(namespace, notes=notes, clock=clock)
        self.followers = Followers(namespace, held, self.book, self.taught, clock)
        self.mirror = self._make_mirror()
        self._log = OnceLog(logger)
        self._wakes = threading.Condition()
        self._told: dict[bytes, ErasureNotice] = {}  # to be applied
        self._is_awaited = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tier-peer-keeper", daemon=True)

    def start(
        self,
        server: PageServer,
        membership: Membership | None,
        pages: PageSettings,
        keys: Keys | None,
    ) -> None:
        """Follow others from now on, on the thread of the page server."""
        settings = self._settings
        self._server = server
        self.follower = Follower(
            self.mirror,
            self.book,
            namespace=self.namespace,
            server=self.followers.server,
            settings=pages,
            silence_s=settings.expiry_s,
            keys=keys,
            heard=self.taught,
            server_side=server,
            clock=self._clock,
        )
        self.discovery = PeerDiscovery(
            settings.peers,
            settings.ports,
            membership=membership,
            found=self.follower.use,
            every_s=settings.look_s,
        )
        self._thread.start()

    @property
    def namespace(self) -> bytes:
        return self.followers.namespace

    @property
    def trouble(self) -> str:
        """Why no other server is known, as one clause; empty while one is, or there is none. Takes
        no lock."""
        if self.mirror.num_peers:
            return ""
        return self.discovery.trouble or self.follower.trouble

    def _make_mirror(self) -> Mirror:
        return Mirror(
            self._settings.max_pages,
            self._settings.max_peers,
            salt=int.from_bytes(self.followers.server[:8], "little"),
            digest=lambda: self.book.digest,
            clock=self._clock,
        )

    def taught(self, erasures: Sequence[ErasureNotice]) -> None:
        """Apply what another server told, soon. The page server's thread."""
        with self._wakes:
            for each in self.book.unknown(erasures):
                if len(self._told) < _MAX_TOLD:
                    self._told[each.id] = each
        self._wake()

    # ---- Erasing, and other namespaces ----

    def begin(self, what: Erasure, local: Future[bool] | None) -> Future[bool]:
        """Tell every server what this one has begun to erase. From now on no page is found at one
        that has not applied it, and single pages only once it says that it has them again."""
        if what.keys:
            self.mirror.hide_pages(what.keys)
        if what.is_empty or not what.spread:
            return ended(not self._is_closed)
        is_done, begun = self.book.begin(what, local)
        self.mirror.choose()
        if local is not None:
            local.add_done_callback(lambda _: self._wake())
        self.follower.tell(begun)
        self._wake()
        return is_done

    def set_namespace(self, namespace: bytes) -> None:
        if namespace == self.namespace:
            return
        with self._wakes:
            self.mirror = self._make_mirror()  # from now on nothing is found
            self.follower.set_namespace(namespace, self.mirror)
            self.followers.namespace = namespace
            self._told.clear()
            self.book.change_namespace(namespace)
            self.followers.holdings = Holdings(self._held)
        self._wake()

    def close(self) -> None:
        with self._wakes:
            if self._is_closed:
                return
            self._is_closed = True
            self._wakes.notify()
        self.book.close()  # before the others seem to be gone
        self.discovery.close()
        self.follower.close()
        self._thread.join(_JOIN_S)

    def check_integrity(self) -> None:
        self.mirror.check_integrity()
        self.book.check_integrity()

    # ---- The keeper's thread ----

    def _wake(self) -> None:
        with self._wakes:
            self._is_awaited = True
            self._wakes.notify()

    def _run(self) -> None:
        pause_s = self._settings.publish_s
        while True:
            with self._wakes:
                self._wakes.wait_for(lambda: self._is_awaited or self._is_closed, pause_s)
                if self._is_closed:
                    break
                told, self._told = list(self._told.values()), {}
                self._is_awaited = False
                mirror = self.mirror
            begun = time.thread_time()
            try:
                self._apply(told, mirror)
                self.book.save()
                digest = self.book.noted_digest  # before: what it names is hidden by now
                is_new = self.followers.holdings.look()
                if is_new or digest != self.followers.digest:
                    self.followers.digest = digest
                    self._server.tell()
            except Exception:
                self._log.fault("keeper", "internal error in what others are told; it goes on")
            else:
                self._log.settle("keeper")
            pause_s = max(self._settings.publish_s, _IDLE_PART * (time.thread_time() - begun))

    def _apply(self, told: list[ErasureNotice], mirror: Mirror) -> None:
        """Apply erasures of others, told while this was the mirror: one of a tenant is enough for
        all that were begun before."""
        applied: dict[bytes | None, Future[bool]] = {}
        for each in self.book.unknown(told):
            local = promise()
            with self._wakes:
                if self.mirror is not mirror:  # another namespace
                    return
                self.book.learn(each, local)  # from now on nothing is taken from who knows less
            try:
                keys = each.split_keys()
                if keys is None and each.tenant in applied:
                    erased = applied[each.tenant]
                else:
                    selected = None if keys is None else tuple(keys)
                    erased = self._erase(Erasure(selected, each.tenant, each.id, spread=False))
                if keys is None:
                    applied[each.tenant] = erased
            except Exception:
                # Those who know it tell it again, and exchange no page with this server until then.
                self._log.fault("erase", "what another server erased could not be erased here")
                keep(local, False)
                continue
            self._log.settle("erase")
            self.book.num_applied += 1
            local.add_done_callback(lambda _: self._wake())
            erased.add_done_callback(partial(keep_as, local))
