"""``Follower``: follows other servers, so that this one knows what they hold and what they erased.

It has a connection to each address, apart from those that carry pages: what must be true waits
behind no page. They belong to the thread of the page server. A server is asked one question at a
time (``Follow``) and answers when there is something to say.

    resting --connect--> asking --first answer--> live --silence, loss, breach--> resting

Where digests of erasures differ, both sides say what they know (``Compare``), and teach each other
the difference. What begins here is told at once. Who agrees by now, and what has spread, is looked
at with every tick, whatever was heard meanwhile.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.mirror import UNTOLD
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import PageLink
from sglang_tiered.sharing.pages.messages import MAX_FOLLOW_FRAME_BYTES
from sglang_tiered.storage.backoff import Backoff, OnceLog
from sglang_tiered.wire.sockets import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sglang_tiered.sharing.erasures import ErasureBook, Known
    from sglang_tiered.sharing.mirror import Mirror, MirroredPeer
    from sglang_tiered.sharing.pages.messages import Changes, ErasureNotice, Erasures, FromServer
    from sglang_tiered.sharing.pages.server import PageServer
    from sglang_tiered.sharing.settings import PageSettings
    from sglang_tiered.wire.keys import Keys


logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0
_ASIDE_S = 30.0  # an address that leads to this server, or to one that is known, is asked again
_COMPARE_S = 1.0  # what was told meanwhile needs no comparison
_TEACH = 8  # erasures of a message, with 1,024 keys each
_DIFFERS = "its erasures are not yet those of this server"


@dataclass(eq=False, slots=True)
class _FollowedAddress:
    """One address, and the server behind it."""

    address: str
    backoff: Backoff
    is_named: bool = True  # else it is followed for as long as it answers
    link: PageLink | None = None
    is_asked: bool = False  # over this link, and did not answer yet
    told: bytes = UNTOLD  # its last digest over this link
    aside_until: float = 0.0
    heard_at: float = 0.0
    trouble: str = ""
    known: MirroredPeer | None = None
    version: int = -1  # of the book: it has applied all up to here
    comparing: Known | None = None
    compare_at: float = 0.0  # not before

    @property
    def is_live(self) -> bool:
        return self.known is not None and self.known.is_live


class Follower:
    """``heard`` takes erasures that other servers told, to be applied. Calls come from any thread
    and never block."""

    def __init__(
        self,
        mirror: Mirror,
        book: ErasureBook,
        *,
        namespace: bytes,
        server: bytes,
        settings: PageSettings,
        silence_s: float,
        keys: Keys | None,
        heard: Callable[[list[ErasureNotice]], None],
        server_side: PageServer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mirror = mirror
        self._book = book
        self._namespace = namespace
        self._server = server
        self._settings = settings
        self._silence_s = silence_s
        self._keys = keys
        self._heard = heard
        self._clock = clock
        self._context = server_side.context
        self._followed: dict[str, _FollowedAddress] = {}
        self._log = OnceLog(logger)
        self._is_closed = False
        self._is_whole = False
        self.num_failures = 0
        self.num_breaches = 0
        self._loop = server_side.loop
        self._loop.call(self._loop.add_tick, self._tick)

    # ---- Any thread ----

    def use(self, addresses: Iterable[str], is_whole: bool) -> None:
        """Follow the servers at these addresses, ``tcp://IP:port``, and those that are named no
        more for as long as they answer. ``is_whole``: there may be no others, so what these have
        erased is erased everywhere."""
        self._loop.call(self._use, list(addresses), is_whole)

    def tell(self, begun: list[ErasureNotice]) -> None:
        """Tell others what has just begun here."""
        self._loop.call(self._tell, begun)

    def set_namespace(self, namespace: bytes, mirror: Mirror) -> None:
        """Follow servers of another namespace from now on, and keep what they hold in a mirror of
        its own. What is still heard of the one before goes to the one before."""
        self._loop.call(self._begin_namespace, namespace, mirror)

    @property
    def trouble(self) -> str:
        """Why nothing is found at some address, as one clause; empty where all is well."""
        said = (f"{each.address}: {each.trouble}" for each in self._all() if each.trouble)
        return next(said, "")

    def _all(self) -> list[_FollowedAddress]:
        return list(self._followed.values())

    def close(self) -> None:
        """End the connections, soon. Idempotent; before the page server is stopped."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call(self._end_all)

    # ---- The page server's thread ----

    def _use(self, addresses: list[str], is_whole: bool) -> None:
        self._is_whole |= is_whole
        for each in self._all():
            each.is_named = each.address in addresses
        for address in addresses:
            if address not in self._followed:
                backoff = Backoff(self._clock, _FIRST_RETRY_S, _LAST_RETRY_S, spread=0.5)
                self._followed[address] = _FollowedAddress(address, backoff)
        self._tick(0.0)

    def _tick(self, _: float) -> None:
        now, ours = self._clock(), self._book.known
        for each in self._all():
            if each.link is not None:
                each.link.check(self._silence_s)
                if each.comparing is not None and now - each.compare_at > self._silence_s:
                    each.link.lose("it does not say what it erased")
            elif each.is_named and each.backoff.is_over and each.aside_until <= now:
                self._connect(each)
            if each.known is not None and now - each.heard_at > self._silence_s:
                self._drop(each)
            if each.is_live:
                self._agree(each, ours)
            elif each.link is None and each.known is None and not each.is_named:
                self._end(each)
        self._mirror.choose()
        self._settle()

    def _connect(self, each: _FollowedAddress) -> None:
        if self._is_closed:
            return
        try:
            each.link = PageLink(
                self._loop,
                self._context,
                each.address,
                self._settings,
                self._keys,
                heard=partial(self._hear, each),
                lost=partial(self._lost, each),
                clock=self._clock,
                max_frame_bytes=MAX_FOLLOW_FRAME_BYTES,
            )
        except TransferError as error:
            self._fail(each, printable(str(error)))
            return
        each.comparing, each.version, each.compare_at = None, -1, 0.0
        each.told = UNTOLD
        self._ask(each, each.link)

    def _ask(self, each: _FollowedAddress, link: PageLink) -> None:
        position = (0, 0, 0) if each.known is None else each.known.position
        digest = self._book.digest
        link.send(messages.Follow(self._namespace, self._server, digest, each.told, *position))
        each.is_asked = True

    def _hear(
        self,
        each: _FollowedAddress,
        link: PageLink,
        message: FromServer,
        payload: list[memoryview],
    ) -> None:
        if isinstance(message, messages.Erasures):
            self._hear_erasures(each, message)
        elif isinstance(message, messages.Changes):
            if not each.is_asked:
                raise TransferError("a page server answered what it was not asked.")
            each.is_asked, each.told = False, message.digest
            self._hear_changes(each, message, payload)
            if each.link is link:
                self._ask(each, link)
        else:
            raise TransferError("a page server answered what it was not asked.")

    def _hear_changes(
        self, each: _FollowedAddress, message: Changes, payload: list[memoryview]
    ) -> None:
        each.heard_at = self._clock()
        each.backoff.succeed()
        if message.server == self._server:
            self._set_aside(each)  # it is this server itself
        elif message.namespace != self._namespace:
            self._drop(each)
            self._report(each, "it has another model, or other settings or weights")
        elif (known := self._greet(each, message)) is not None:
            before, known.is_live = (known.is_live, known.digest), True
            self._mirror.take(known, message, payload)
            if known.digest != message.digest and not message.more:
                # Pages that it erased are not listed here any more.
                known.digest, known.agreed_with = message.digest, b""
            if before != (True, known.digest):
                self._mirror.choose()
                self._agree(each, self._book.known)
                self._settle()
            if known.num_cut:
                most = self._mirror.max_pages
                self._report(each, f"with its pages there are more than {most:,} to be known")
            elif each.trouble != _DIFFERS:
                self._recover(each)

    def _greet(self, each: _FollowedAddress, message: Changes) -> MirroredPeer | None:
        """Know the server that answers. Returns None where there is none to know."""
        server = message.server.hex()
        if each.known is not None and each.known.server == server:
            return each.known
        self._drop(each)
        each.version = -1
        each.known = self._mirror.join(server, each.address)
        if each.known is None:
            is_known = any(o.known and o.known.server == server for o in self._all())
            self._set_aside(each)
            if not is_known:  # by another address
                self._report(each, "there are more servers than this one can know")
        return each.known

    # ---- Erasures ----

    def _agree(self, each: _FollowedAddress, ours: Known) -> None:
        """See whether a server has applied the same erasures; if not, compare, but not at once with
        one that agreed: it was told what began here."""
        known, now = each.known, self._clock()
        assert known is not None
        if ours.digest in (known.digest, known.agreed_with):
            each.version, each.compare_at = ours.version, now + _COMPARE_S
            if each.trouble == _DIFFERS:
                self._recover(each)
        elif each.comparing is None and each.compare_at <= now and each.link is not None:
            asked, ids = self._book.ids()
            each.compare_at = now + _COMPARE_S
            if each.link.send(messages.Compare(self._namespace, ids)):
                each.comparing = asked

    def _hear_erasures(self, each: _FollowedAddress, message: Erasures) -> None:
        asked, each.comparing = each.comparing, None
        if asked is None:
            raise TransferError("a page server told what it was not asked.")
        for told in message.erasures:
            told.split_keys()  # raises
        unknown = self._book.unknown(message.erasures)
        teach, version = self._book.lacked(message.lacking)
        each.version = max(0, min(asked.version, version))
        if unknown:
            self._heard(unknown)
        if teach and each.link is not None:
            each.link.send(messages.Teach(self._namespace, teach))
        known = each.known
        if unknown or teach:
            self._report(each, _DIFFERS)
        elif known is not None and known.digest == message.digest:
            known.agreed_with = asked.digest  # they differ in what is too old to matter
            self._mirror.choose()

    def _tell(self, begun: list[ErasureNotice]) -> None:
        for at in range(0, len(begun), _TEACH):
            message = messages.Teach(self._namespace, begun[at : at + _TEACH])
            for each in self._all():
                if each.is_live and each.link is not None:
                    each.link.send(message)  # what does not go out is found by comparing

    def _settle(self) -> None:
        """What has spread: to whoever answered within ``silence_s``, or may be about to answer for
        the first time. What does not answer is off, else a fleet with many such never ends."""
        versions = [
            each.version
            for each in self._all()
            if each.known is not None
            or (each.link is not None and each.heard_at < each.link.opened_at)
            and (each.link.is_open or not each.backoff.num_failures)
        ]
        if not self._is_whole:
            versions.append(-1)
        self._book.settle(min(versions, default=None))

    # ---- Coming and going ----

    def _begin_namespace(self, namespace: bytes, mirror: Mirror) -> None:
        self._namespace, self._mirror = namespace, mirror
        for each in self._all():
            had_link = each.link is not None
            self._end_link(each)  # over which it is asked about the one before
            each.known = None
            if had_link:
                self._connect(each)

    def _set_aside(self, each: _FollowedAddress) -> None:
        self._end_link(each)
        each.aside_until, each.trouble = self._clock() + _ASIDE_S, ""
        self._drop(each)

    def _lost(self, each: _FollowedAddress, _: PageLink, why: str, is_breach: bool) -> None:
        """Note the end of a connection. What the server holds is known for a while longer, should
        it be back, but nothing is found there."""
        self.num_breaches += is_breach
        self._end_link(each)
        if each.known is not None:
            each.known.is_live = False
        self._mirror.choose()
        self._fail(each, why)

    def _end_link(self, each: _FollowedAddress) -> None:
        link, each.link, each.comparing = each.link, None, None
        if link is not None:
            link.close()

    def _end(self, each: _FollowedAddress) -> None:
        del self._followed[each.address]
        self._end_link(each)
        self._drop(each)
        self._log.settle(each.address)

    def _end_all(self) -> None:
        for each in self._all():
            self._end(each)

    def _drop(self, each: _FollowedAddress) -> None:
        if each.known is not None:
            self._mirror.drop(each.known)
        each.known = None

    def _fail(self, each: _FollowedAddress, why: str) -> None:
        self.num_failures += 1
        each.backoff.fail()
        self._report(each, why)

    def _report(self, each: _FollowedAddress, why: str) -> None:
        each.trouble = why
        self._log.report(each.address, "no page is taken from %s: %s", each.address, why)

    def _recover(self, each: _FollowedAddress) -> None:
        each.trouble = ""
        self._log.settle(each.address)
