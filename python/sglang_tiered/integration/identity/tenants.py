"""Tenants: the owners of pages, and what keeps a purged tenant's nodes in the tree out of reach.

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

from sglang_tiered.storage.base import NO_TENANT, TENANT_BYTES

__all__ = [
    "MAX_KEY_BYTES",
    "SECRET_BITS",
    "UNKNOWN_TENANT",
    "PurgedTenants",
    "key_of_request",
    "short_key",
    "tenant_digest",
]

MAX_KEY_BYTES = 4096
"""Of an ``extra_key`` or a ``cache_salt``, in UTF-8. Nodes of the tree keep them, each its own."""

SECRET_BITS = 62

_LONG = "\x1flong\x1f"  # before the digest of a longer one

_ADAPTER = "\x1fadapter\x1f"  # behind the last one: a LoRA adapter's id, or nothing

UNKNOWN_TENANT = b"\xff" * TENANT_BYTES
"""The tenant of pages that reached the storage thread without one. Every purge removes them, since
they may belong to any tenant."""


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
    it: a digest of a long one, and of one that reads as such a digest."""
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


class PurgedTenants:
    """Tenants purged since the last reset of the tree, which needs an idle scheduler. Until then
    their requests use another ``extra_key``: they match no node from before the purge, and no later
    request matches those nodes. Neither is stored meanwhile.

    SGLang's tree cannot remove the nodes of one tenant; a key that is never used again hides them
    just as well until the tree is reset. Owned by the scheduler thread.
    """

    def __init__(self) -> None:
        self._purges: dict[bytes | None, str] = {}  # marks by tenant; None: all
        self._token = ""
        self._num_purges = 0
        self.use_secret(secrets.randbits(SECRET_BITS))

    def use_secret(self, secret: int) -> None:
        """Set the secret of the marks, which no user can guess, so that no user's key reads as
        marked. It must be the same on every rank, because SGLang's checks of rank divergence
        compare keys. Call it before any purge."""
        assert not self._purges, "keys with the old secret are in use"
        self._token = f"{secret:016x}"

    def __bool__(self) -> bool:
        return bool(self._purges)

    def quarantine(self, tenant: bytes | None) -> None:
        """Hide the nodes of a tenant, or of all (None), that are in the tree now."""
        self._num_purges += 1
        self._purges[tenant] = f"\x1f{self._token}-{self._num_purges}."

    def release_all(self) -> None:
        """End every quarantine: the tree was reset, with no request under way."""
        self._purges.clear()

    def tenant_of(self, extra_key: str | None, cache_salt: str | None) -> bytes:
        """Return the tenant of a request's key, marked or not; adapters make no difference."""
        return tenant_digest(_users_key(self.original(extra_key)), cache_salt)

    def adapter_of(self, extra_key: str | None) -> str | None:
        """Return the id of the LoRA adapter in a request's key, marked or not; None without."""
        key = self.original(extra_key) or ""
        return key.rpartition(_ADAPTER)[2] or None if _ADAPTER in key else None

    def blocks(self, tenant: bytes) -> bool:
        """Return whether pages of this tenant must not be stored now."""
        return tenant in self._purges or None in self._purges

    def key_of(self, extra_key: str | None, cache_salt: str | None) -> str | None:
        """Return the ``extra_key`` that a request uses from now on."""
        if not self._purges:
            return extra_key
        tenant = self.tenant_of(extra_key, cache_salt)
        marks = [self._purges.get(None), self._purges.get(tenant)]
        mark = "".join(mark for mark in marks if mark is not None)
        return (self.original(extra_key) or "") + mark if mark else extra_key

    def original(self, extra_key: str | None) -> str | None:
        """Return a key without marks, which the tiers know its pages by."""
        if not extra_key or self._token not in extra_key:
            return extra_key
        head, *marked = extra_key.split("\x1f" + self._token)
        return (head + "".join(part.partition(".")[2] for part in marked)) or None
