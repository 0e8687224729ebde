"""``Follower``: follows other servers, so that this one knows what they hold and what they erased.

It has a connection to each address, apart from those that carry pages: what must be true waits
behind no page. They belong to the thread of the page server. A server is asked one question at a
time (``Follow``) and answers when there is something to say.

    resting --connect--> asking --first answer--> live --silence, loss, breach--> resting

Where digests of erasures differ, both sides say what they know (``Compare``), and teach each other
the difference. What begins here is told at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sglang_tiered.errors import TransferError
from sglang_tiered.sharing.mirror import Peer
from sglang_tiered.sharing.pages import messages
from sglang_tiered.sharing.pages.link import PageLink
from sglang_tiered.sharing.pages.messages import ID_BYTES, MAX_FOLLOW_FRAME_BYTES
from sglang_tiered.storage.backoff import Backoff, OnceLog
from sglang_tiered.storage.promises import Promises, keep
from sglang_tiered.wire.sockets import printable, received

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    import numpy.typing as npt

    from sglang_tiered.sharing.erasures import ErasureBook, Known
    from sglang_tiered.sharing.mirror import Mirror, MirroredPeer
    from sglang_tiered.sharing.pages.messages import Changes, Erased, Erasures
    from sglang_tiered.sharing.pages.server import PageServer
    from sglang_tiered.sharing.pages.settings import PageSettings
    from sglang_tiered.wire.keys import Keys

    Fingerprints = npt.NDArray[np.uint64]

__all__ = ["Follower", "changed_pages"]

logger = logging.getLogger(__name__)

_MAX_MESSAGES = 16  # of one server at a time
_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0
_ASIDE_S = 30.0  # an address that leads to this server, or to one that is known, is asked again
_COMPARE_S = 1.0  # what was told meanwhile needs no comparison
_TEACH = 8  # erasures of a message, with 1,024 keys each
_NOBODY = bytes(ID_BYTES)
_UNTOLD = b"\xff" * ID_BYTES  # no digest: who says so is answered at once
_Position = tuple[int, int, int | None]  # epoch, sequence, cursor


@dataclass(eq=False, slots=True)
class _Followed:
    """One address, and the server behind it."""

    address: str
    backoff: Backoff
    is_named: bool = True  # else it is followed for as long as it answers
    has_answered: bool = False  # over this link
    link: PageLink | None = None
    aside_until: float = 0.0
    lost_at: float = 0.0
    trouble: str = ""
    server: bytes = _NOBODY
    known: MirroredPeer | None = None
    epoch: int = 0
    sequence: int = 0
    cursor: int | None = 0
    num_taken: int = 0  # fingerprints of the snapshot under way
    asked: deque[_Position] = field(default_factory=deque)  # without an answer
    num_answers: int = 0
    told: bytes = _UNTOLD
    version: int = -1  # of the book: it has applied all up to here
    comparing: Known | None = None
    compare_at: float = 0.0
    is_teaching: bool = False  # what it told is being applied
    waiting: list[tuple[int, Future[bool]]] = field(default_factory=list)  # for so many answers

    @property
    def position(self) -> _Position:
        return self.epoch, self.sequence, self.cursor

    @property
    def is_live(self) -> bool:
        return self.known is not None and self.known.is_live


class Follower:
    """``heard`` takes erasures that other servers told, to be applied; then call ``compare``. Calls
    come from any thread and never block."""

    def __init__(
        self,
        mirror: Mirror,
        book: ErasureBook,
        *,
        namespace: bytes,
        server: bytes,
        settings: PageSettings,
        silence_s: float,
        max_pages: int,
        keys: Keys | None,
        heard: Callable[[list[Erased]], None],
        server_side: PageServer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mirror = mirror
        self._book = book
        self._namespace = namespace
        self._server = server
        self._settings = settings
        self._silence_s = silence_s
        self._max_pages = max_pages
        self._keys = keys
        self._heard = heard
        self._clock = clock
        self._context = server_side.context
        self._followed: dict[str, _Followed] = {}
        self._promises = Promises()
        self._log = OnceLog(logger)
        self._is_closed = False
        self._is_whole = False
        self.num_failures = 0
        self.num_breaches = 0
        self.num_fingerprints = 0  # heard
        self.num_snapshots = 0
        self._loop = server_side.loop
        self._loop.call(self._loop.add_tick, self._tick)

    # ---- Any thread ----

    def use(self, addresses: Iterable[str], is_whole: bool) -> None:
        """Follow the servers at these addresses, ``tcp://IP:port``, and those that are named no
        more for as long as they answer. ``is_whole``: there may be no others, so what these have
        erased is erased everywhere."""
        self._loop.call(self._use, list(addresses), is_whole)

    def tell(self, begun: list[Erased]) -> None:
        """Tell others what has just begun here."""
        self._loop.call(self._tell, begun)

    def compare(self) -> None:
        """Look again who has applied the same erasures: some were applied here."""
        self._loop.call(self._applied)

    def settle(self) -> None:
        """See whose erasures have spread to everybody."""
        self._loop.call(self._settle)

    def set_namespace(self, namespace: bytes) -> None:
        self._mirror.hide()
        self._loop.call(self._begin_namespace, namespace)

    def refresh(self) -> Future[bool]:
        """True once every server that answers has said what is new."""
        whole = self._promises.make()
        self._loop.call(self._refresh, whole)
        return whole

    @property
    def troubles(self) -> dict[str, str]:
        """Why nothing is found at an address, as one clause each."""
        return {each.address: each.trouble for each in self._all() if each.trouble}

    @property
    def num_links(self) -> int:
        return sum(each.link is not None for each in self._all())

    def _all(self) -> list[_Followed]:
        return list(self._followed.values())

    def close(self) -> None:
        """End the connections, soon. Idempotent; before the page server is stopped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._promises.close()
        self._loop.call(self._end_all)

    # ---- The page server's thread ----

    def _use(self, addresses: list[str], is_whole: bool) -> None:
        self._is_whole |= is_whole
        for each in self._all():
            each.is_named = each.address in addresses
        for address in addresses:
            if address not in self._followed:
                backoff = Backoff(_FIRST_RETRY_S, _LAST_RETRY_S, spread=0.5)
                self._followed[address] = _Followed(address, backoff)
        self._tick(0.0)

    def _tick(self, _: float) -> None:
        now = self._clock()
        for each in self._all():
            link = each.link
            if link is None:
                if each.known is not None and now - each.lost_at > self._silence_s:
                    self._drop(each)
                if not each.is_named:
                    if each.known is None:
                        self._end(each)
                elif each.backoff.is_over(now) and each.aside_until <= now and not self._is_closed:
                    self._connect(each, now)
            elif not link.is_open and now - link.opened_at > self._settings.connect_timeout_s:
                self._lose(each, "it does not answer")
            elif now - link.last_heard > self._silence_s:
                self._lose(each, f"it has said nothing for {self._silence_s:g} s")
            elif each.comparing is not None and now - each.compare_at > self._silence_s:
                self._lose(each, "it does not say what it erased")
            elif each.is_live and 0 < each.compare_at <= now:
                self._agree(each)
        self._mirror.choose()
        self._settle()

    def _connect(self, each: _Followed, now: float) -> None:
        try:
            each.link = link = PageLink.connect(
                self._context,
                each.address,
                self._settings,
                self._keys,
                now,
                max_frame_bytes=MAX_FOLLOW_FRAME_BYTES,
            )
        except TransferError as error:
            self._fail(each, printable(str(error)))
            return
        each.asked.clear()
        each.comparing, each.version = None, -1
        each.has_answered, each.told = False, _UNTOLD
        self._loop.add_socket(link.socket, lambda: self._on_messages(each, link))
        self._loop.add_socket(link.monitor, lambda: self._on_monitor(each, link))
        self._ask(each)

    def _ask(self, each: _Followed) -> None:
        assert each.link is not None
        question = messages.Follow(
            self._namespace,
            self._server,
            self._book.digest,
            each.told,
            each.epoch,
            each.sequence,
            each.cursor,
        )
        if each.link.send(question):
            each.asked.append(each.position)

    def _on_messages(self, each: _Followed, link: PageLink) -> None:
        for frames in received(link.socket, _MAX_MESSAGES):
            link.last_heard = self._clock()
            try:
                self._hear(each, [frame.buffer for frame in frames])
            except TransferError as error:
                self.num_breaches += 1
                self._lose(each, printable(str(error)))
            if each.link is not link:
                return

    def _on_monitor(self, each: _Followed, link: PageLink) -> None:
        reason = link.loss_reason()
        if reason is not None and each.link is link:
            self._on_messages(each, link)  # reads what it sent before
            if each.link is link:
                self._lose(each, f"it {reason}")

    def _hear(self, each: _Followed, frames: list[memoryview]) -> None:
        message = messages.decode_from_server(frames)
        if isinstance(message, messages.Refuse):
            raise TransferError(message.reason)
        if isinstance(message, messages.Erasures):
            self._hear_erasures(each, message)
        elif isinstance(message, messages.Changes):
            added, removed = changed_pages(message, frames[2:])
            self._hear_changes(each, message, added, removed)
        else:
            raise TransferError("a page server answered what it was not asked.")

    def _hear_changes(
        self,
        each: _Followed,
        message: Changes,
        added: Fingerprints,
        removed: Fingerprints,
    ) -> None:
        if not each.asked:
            raise TransferError("a page server answered what it was not asked.")
        is_new = each.asked.popleft() == each.position  # else it is of a question from before
        each.num_answers += 1
        each.has_answered = True
        each.backoff.succeed()
        if message.server == self._server:
            self._set_aside(each)  # it is this server itself
            return
        each.told = message.digest
        if message.namespace != self._namespace:
            each.epoch, each.cursor = 0, 0
            self._drop(each)
            self._report(each, "it has another model, or other settings or weights")
        elif self._greet(each, message):
            known = each.known
            assert known is not None
            known.is_live = True
            if is_new or message.epoch != each.epoch:
                self._take(each, known, message, added, removed)
            if known.digest != message.digest and not message.more:
                # Pages that it erased are not listed here any more.
                known.digest, known.agreed_with = message.digest, b""
            self._mirror.choose()
            self._agree(each)
            self._settle()
            if not (known.is_cut or each.trouble.startswith("its erasures")):
                self._recover(each)
        if each.link is None:
            return
        if not message.more:
            for wanted, future in each.waiting:
                if each.num_answers >= wanted:
                    keep(future, True)
            each.waiting = [one for one in each.waiting if not one[1].done()]
        if not each.asked:
            self._ask(each)

    def _greet(self, each: _Followed, message: Changes) -> bool:
        """Know the server that answers. Returns false where there is none to know."""
        if each.known is not None and each.server == message.server:
            return True
        self._drop(each)
        each.server, each.epoch, each.version = message.server, 0, -1
        each.known = self._mirror.join(Peer(message.server.hex(), each.address))
        if each.known is None:
            if any(other.server == each.server and other is not each for other in self._all()):
                self._set_aside(each)  # it is known by another address
            else:
                self._report(each, "there are more servers than this one can know")
        return each.known is not None

    def _take(
        self,
        each: _Followed,
        known: MirroredPeer,
        message: Changes,
        added: Fingerprints,
        removed: Fingerprints,
    ) -> None:
        """Take up what came and went. What does not follow on what is known is asked for anew."""
        self.num_fingerprints += len(added) + len(removed)
        if message.start == 0:
            self._mirror.unload(known)
            each.epoch, each.sequence, each.cursor = message.epoch, message.sequence, 0
            each.num_taken = 0
            self.num_snapshots += 1
        if message.epoch != each.epoch or each.epoch == 0:
            each.epoch, each.cursor = 0, 0  # of numbers whose beginning is not here
        elif message.start is not None:
            self._take_piece(each, known, message, added)
        elif message.num_added or message.num_removed:
            if each.cursor is not None or message.sequence != each.sequence + 1:
                each.cursor = 0
                return
            if known.is_cut:
                self._mirror.note_cut(known, len(added) - len(removed))
            else:
                self._mirror.remove_pages(known, removed)
                if not self._mirror.add_pages(known, added):
                    self._cut(each, known, known.num_pages + known.num_cut + len(added))
            each.sequence += 1
        if each.cursor is None and self._mirror.may_hold_more(known):
            each.cursor = 0

    def _take_piece(
        self, each: _Followed, known: MirroredPeer, message: Changes, added: Fingerprints
    ) -> None:
        if message.start != each.cursor:
            each.cursor = 0
            return
        each.num_taken += max(len(added), 1)
        if each.num_taken > 4 * self._max_pages + messages.MAX_FINGERPRINTS:
            raise TransferError("a page server names pages without an end.")
        each.cursor = None if message.end is None else message.end + 1
        if not self._mirror.add_pages(known, added):
            part = (each.cursor or 1 << 64) / (1 << 64)  # fingerprints are spread evenly
            self._cut(each, known, int(each.num_taken / part))
        elif each.cursor is None:
            self._mirror.loaded(known)

    def _cut(self, each: _Followed, known: MirroredPeer, num_pages: int) -> None:
        """Go on without a server's pages until there is room for all."""
        self._mirror.cut(known, num_pages)
        each.cursor = None
        self._report(each, f"with its pages there are more than {self._max_pages:,} to be known")

    # ---- Erasures ----

    def _agree(self, each: _Followed) -> None:
        """See whether a server has applied the same erasures; if not, compare after a while."""
        known, now = each.known, self._clock()
        assert known is not None
        ours = self._book.known
        if ours.digest in (known.digest, known.agreed_with):
            each.version, each.compare_at = ours.version, 0.0
            if each.trouble.startswith("its erasures"):
                self._recover(each)
            return
        if each.version < 0 and each.compare_at == 0.0:
            each.compare_at = now  # it was not there: what it lacks is told by nobody else
        elif each.compare_at == 0.0:
            each.compare_at = now + _COMPARE_S
        if each.comparing is None and each.compare_at <= now and each.link is not None:
            each.comparing, ids = self._book.ids()
            each.compare_at = now + _COMPARE_S
            if not each.link.send(messages.Compare(self._namespace, ids)):
                each.comparing = None

    def _hear_erasures(self, each: _Followed, message: Erasures) -> None:
        asked, each.comparing = each.comparing, None
        if asked is None:
            raise TransferError("a page server told what it was not asked.")
        for told in message.erasures:
            told.split_keys()  # raises
        unknown = self._book.unknown(message.erasures)
        teach = self._book.take(message.lacking)
        each.version = max(0, min(asked.version, self._book.version_without(message.lacking)))
        each.is_teaching = bool(unknown)
        if unknown:
            self._heard(unknown)
        if teach and each.link is not None:
            each.link.send(messages.Teach(self._namespace, teach))
        known = each.known
        if unknown or teach:
            self._report(each, "its erasures are not yet those of this server")
        elif known is not None and known.digest == message.digest:
            known.agreed_with = asked.digest  # they differ in what is too old to matter
            self._mirror.choose()
            self._agree(each)
        self._settle()

    def _tell(self, begun: list[Erased]) -> None:
        for at in range(0, len(begun), _TEACH):
            message = messages.Teach(self._namespace, begun[at : at + _TEACH])
            for each in self._all():
                if each.is_live and each.link is not None:
                    each.link.send(message)  # what does not go out is found by comparing
        self._compare_all()

    def _applied(self) -> None:
        for each in self._all():
            if each.is_teaching:
                each.is_teaching, each.compare_at = False, self._clock()
        self._compare_all()

    def _compare_all(self) -> None:
        self._mirror.choose()
        for each in self._all():
            if each.is_live:
                self._agree(each)
        self._settle()

    def _settle(self) -> None:
        """What has spread: to whoever answered within ``silence_s``, or may be about to answer for
        the first time."""
        versions = [
            each.version
            for each in self._all()
            if each.known is not None or (each.link is not None and not each.has_answered)
        ]
        if not self._is_whole:
            versions.append(-1)
        self._book.settle(min(versions, default=None))

    # ---- Coming and going ----

    def _begin_namespace(self, namespace: bytes) -> None:
        self._mirror.begin_namespace()
        self._namespace = namespace
        for each in self._all():
            each.known, each.server, each.epoch, each.cursor = None, _NOBODY, 0, 0
            each.comparing, each.version, each.compare_at = None, -1, 0.0
            each.has_answered = False
            if each.link is not None:
                self._ask(each)  # its parked question is of the one before

    def _refresh(self, whole: Future[bool]) -> None:
        left = 0

        def end(_: Future[bool] | None = None) -> None:
            nonlocal left
            left -= 1
            if not left:
                keep(whole, True)

        left = 1
        for each in self._all():
            if each.link is not None and each.aside_until <= self._clock():
                part = self._promises.make()
                left += 1
                part.add_done_callback(end)
                self._ask(each)
                each.waiting.append((each.num_answers + len(each.asked), part))
                self._ask(each)  # which has the one before answered at once
        end()

    def _set_aside(self, each: _Followed) -> None:
        self._end_link(each)
        each.aside_until = self._clock() + _ASIDE_S
        each.known, each.trouble = None, ""

    def _lose(self, each: _Followed, why: str) -> None:
        """End a connection. What the server holds is known for a while longer, should it be back,
        but nothing is found there."""
        self._end_link(each)
        if each.is_live:  # else it was lost before, and did not come back
            each.lost_at = self._clock()
        if each.known is not None:
            each.known.is_live = False
        self._mirror.choose()
        self._fail(each, why)
        self._settle()

    def _end_link(self, each: _Followed) -> None:
        link, each.link = each.link, None
        if link is not None:
            link.close()
            self._loop.remove_socket(link.monitor)
            self._loop.remove_socket(link.socket)
        for _, future in each.waiting:
            keep(future, True)  # there is nobody to ask
        each.waiting.clear()

    def _end(self, each: _Followed) -> None:
        del self._followed[each.address]
        self._end_link(each)
        self._drop(each)
        self._log.settle(each.address)

    def _end_all(self) -> None:
        for each in self._all():
            self._end(each)

    def _drop(self, each: _Followed) -> None:
        if each.known is not None:
            self._mirror.drop(each.known)
            each.known = None
            each.server, each.epoch, each.cursor, each.told = _NOBODY, 0, 0, _UNTOLD

    def _fail(self, each: _Followed, why: str) -> None:
        self.num_failures += 1
        each.backoff.fail(self._clock())
        self._report(each, why)

    def _report(self, each: _Followed, why: str) -> None:
        each.trouble = why
        self._log.report(each.address, "no page is taken from %s: %s", each.address, why)

    def _recover(self, each: _Followed) -> None:
        each.trouble = ""
        self._log.settle(each.address)


def changed_pages(message: Changes, payload: list[memoryview]) -> tuple[Fingerprints, ...]:
    """Return the fingerprints that came and went. Raises ``TransferError`` for a breach."""
    data = b"".join(payload)
    if len(data) != 8 * (message.num_added + message.num_removed):
        raise TransferError(
            f"a page server sent {len(data)} bytes for {message.num_added} pages that came and "
            f"{message.num_removed} that went."
        )
    if message.end is not None and not (message.start or 0) <= message.end < 1 << 64:
        raise TransferError("a page server sent a piece that ends before it begins.")
    pages = np.frombuffer(data, "<u8")
    return pages[: message.num_added], pages[message.num_added :]
