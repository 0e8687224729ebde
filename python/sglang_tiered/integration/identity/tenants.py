"""Tenants: the owners of pages, and what keeps nodes and pages that are hidden in the tree out of
reach.

A tenant is the ``extra_key`` and ``cache_salt`` of its requests, which SGLang seeds page hashes
with. Its name on disk and in reports is a digest of both. The digest does not reveal them, but a
reader of it can confirm a guess, as with SGLang's page hashes: a secret salt must be long and
random.

SGLang appends the id of a LoRA adapter to ``extra_key``, so a request of the base model that sends
the id as its key would share the adapter's pages. ``key_of_request`` puts a mark between them,
which tells the two apart and names the tenant of an adapter's pages.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from sglang_tiered.storage.base import NO_TENANT, TENANT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


MAX_KEY_BYTES = 4096
"""Of an ``extra_key`` or a ``cache_salt``, in UTF-8. Nodes of the tree keep them, each its own."""

SECRET_BITS = 62

MAX_HIDDEN_TENANTS = 4096
"""Tenants hidden one by one; beyond, all that memory holds is hidden, which is one entry."""

_MARK = "\x1f"

_tokens: set[str] = set()
"""How the marks of this process begin."""

_LONG = "\x1flong\x1f"  # before the digest of a longer one

_ADAPTER = "\x1fadapter\x1f"  # behind the last one: a LoRA adapter's id, or nothing

UNKNOWN_TENANT = b"\xff" * TENANT_BYTES
"""The tenant of pages that reached the storage thread without one. Every erasure of a tenant
removes them, since they may belong to any."""


MAX_HIDDEN_PAGES = 131_072
"""Hidden pages beyond which memory is better emptied: about 150 bytes each."""


def tenant_digest(extra_key: str | None, cache_salt: str | None) -> bytes:
    """Return the tenant of pages hashed under these; an empty text counts as absent, as in
    SGLang."""
    if not extra_key and not cache_salt:
        return NO_TENANT
    state = hashlib.blake2b(digest_size=TENANT_BYTES, person=b"sgltiered-tenant")
    for part in (extra_key or "", cache_salt or ""):
        data = part.encode(errors="surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def short_key(key: str | None) -> str | None:
    """Return an ``extra_key`` or ``cache_salt`` as the tree, the tiers and the tenant's digest have
    it. A long one, and one that reads as such a digest, becomes a digest."""
    if key is None or (len(key) * 4 <= MAX_KEY_BYTES and not key.startswith(_LONG)):
        return key
    data = key.encode(errors="surrogatepass")
    if len(data) <= MAX_KEY_BYTES and not key.startswith(_LONG):
        return key
    return _LONG + hashlib.blake2b(data, digest_size=32, person=b"sgltiered-longky").hexdigest()


def key_of_request(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return the key to use for a request with SGLang's ``extra_key``: a user's own key unchanged,
    unless it is long or could be taken for an adapter's."""
    if lora_id:
        return f"{short_key((extra_key or '').removesuffix(lora_id))}{_ADAPTER}{lora_id}"
    extra_key = short_key(extra_key)
    return extra_key + _ADAPTER if extra_key and _ADAPTER in extra_key else extra_key


def _users_key(extra_key: str | None) -> str | None:
    """Undo ``key_of_request``: the key without the adapter."""
    return extra_key.rpartition(_ADAPTER)[0] if extra_key and _ADAPTER in extra_key else extra_key


def is_marked(extra_key: str | None) -> bool:
    """Whether a key bears a mark of this process."""
    return _original(extra_key, _tokens) != extra_key


def around_seed(
    seed: Callable[[str | None, str | None], str | None],
    extra_key: str | None,
    cache_salt: str | None,
) -> str | None:
    """Wrap SGLang's ``storage_namespace_seed``, which page hashes begin with: marks separate nodes
    in the tree only, and the tiers know a page by one name."""
    return seed(_original(extra_key, _tokens), cache_salt)


def _original(extra_key: str | None, tokens: set[str]) -> str | None:
    if not extra_key or _MARK not in extra_key:
        return extra_key
    for token in tokens:
        if token in extra_key:
            head, *marked = extra_key.split(token)
            extra_key = head + "".join(part.partition(".")[2] for part in marked)
    return extra_key or None


class HiddenTenants:
    """Hides nodes that are in the tree from every request that comes later: those of erased
    tenants, or all. Requests use another ``extra_key`` from then on, so they match no node from
    before and no later request matches those.

    SGLang's tree cannot remove the nodes of one tenant. Those that are hidden are used no more, so
    they are evicted as others need their memory. The other key lasts until the tree is reset, which
    needs an idle scheduler; page hashes leave the marks out (``around_seed``), so it costs nobody
    a hit in the tiers. Only what goes by a key with the marks of now may be stored. Owned by the
    scheduler thread.
    """

    def __init__(self) -> None:
        self._hidden: dict[bytes | None, str] = {}  # marks by tenant; None: all
        self._token = ""
        self._num_hidden = 0
        self.use_secret(secrets.randbits(SECRET_BITS))

    def use_secret(self, secret: int) -> None:
        """Set the secret of the marks, which no user can guess, so that no user's key reads as
        marked. It must be the same on every rank, because SGLang's checks of rank divergence
        compare keys. Call it before any is hidden."""
        assert not self._hidden, "keys with the old secret are in use"
        _tokens.discard(self._token)
        self._token = f"{_MARK}{secret:016x}-"
        _tokens.add(self._token)

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def quarantine(self, tenant: bytes | None) -> None:
        """Hide the nodes of a tenant, or of all (None), that are in the tree now."""
        self._num_hidden += 1
        if len(self._hidden) >= MAX_HIDDEN_TENANTS:
            tenant = None
        if tenant is None:
            self._hidden.clear()
        self._hidden[tenant] = f"{self._token}{self._num_hidden}."

    def release_all(self) -> None:
        """Use plain keys again: the tree was reset, with no request under way."""
        self._hidden.clear()

    def tenant_of(self, extra_key: str | None, cache_salt: str | None) -> bytes:
        """Return the tenant of a request's key, marked or not; adapters make no difference."""
        return tenant_digest(_users_key(self.original(extra_key)), cache_salt)

    def adapter_of(self, extra_key: str | None) -> str | None:
        """Return the id of the LoRA adapter in a request's key, marked or not; None without."""
        key = self.original(extra_key) or ""
        return key.rpartition(_ADAPTER)[2] or None if _ADAPTER in key else None

    def is_hidden(self, extra_key: str | None, cache_salt: str | None) -> bool:
        """Whether a node or request with this key is from before its tenant was erased, or all was
        hidden: what it holds must not be stored."""
        marks = self._marks(extra_key, cache_salt)
        key = extra_key or ""
        return key.count(self._token) != len(marks) or not all(mark in key for mark in marks)

    def key_of(self, extra_key: str | None, cache_salt: str | None) -> str | None:
        """Return the ``extra_key`` that a request uses from now on."""
        if not self._hidden and (not extra_key or self._token not in extra_key):
            return extra_key
        mark = "".join(self._marks(extra_key, cache_salt))
        return (self.original(extra_key) or "") + mark if mark else self.original(extra_key)

    def _marks(self, extra_key: str | None, cache_salt: str | None) -> list[str]:
        if not self._hidden:
            return []
        tenant = self.tenant_of(extra_key, cache_salt)
        marks = (self._hidden.get(None), self._hidden.get(tenant))
        return [mark for mark in marks if mark is not None]

    def original(self, extra_key: str | None) -> str | None:
        """Return a key without marks, which the tiers know its pages by."""
        return _original(extra_key, {self._token})


class HiddenPages:
    """The hashes of the pages that memory may still hold and nobody may find there. Lookups on any
    thread, without a lock; the rest on the scheduler's.

    SGLang's tree has no call that removes one path. So a page that was erased is hidden by its
    hash, which names all tokens up to its end: matches end before it, and nothing stores it. A
    request that computes it again makes it visible again. A request that ran when the page was
    erased does not: what it brings is from before.
    """

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self.version = 0
        """Grows with what is hidden. A request that saw one has seen the pages hidden up to it."""

    def __bool__(self) -> bool:
        return bool(self._since)

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, page_hash: object) -> bool:
        return page_hash in self._since

    @property
    def are_too_many(self) -> bool:
        """Whether memory should be hidden as a whole instead, until it can be emptied."""
        return len(self._since) > MAX_HIDDEN_PAGES

    def hide(self, hashes: Iterable[str]) -> None:
        """Hide pages from now on. A page that is hidden already counts as hidden just now."""
        # The version last: who sees it sees all pages of it.
        self._since.update(dict.fromkeys(hashes, self.version + 1))
        self.version += 1

    def num_visible(self, hashes: Sequence[str]) -> int:
        """Count the leading pages that are not hidden."""
        since = self._since
        if not since:
            return len(hashes)
        return next((at for at, each in enumerate(hashes) if each in since), len(hashes))

    def computed(self, hashes: Iterable[str], seen: int, *, is_behind: bool) -> tuple[bool, bool]:
        """Take note of pages of one chain, in order, that the tree holds by a request which had
        seen version ``seen`` when it began. ``is_behind``: a page before them stays hidden, so
        they are hidden with it. Returns whether any became visible, and ``is_behind`` for what
        follows."""
        has_shown = False
        for each in hashes:
            since = self._since.get(each)
            is_behind = is_behind or (since is not None and since > seen)
            if is_behind:
                self._since.setdefault(each, self.version)
            elif since is not None:
                del self._since[each]
                has_shown = True
        return has_shown, is_behind

    def clear(self) -> None:
        """Hide nothing any more: memory holds none of these pages."""
        self._since = {}
        self.version += 1
