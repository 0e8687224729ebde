"""Tenants: whom a page belongs to, and what keeps a purged one's nodes in the tree out of reach.

A tenant is the ``extra_key`` and ``cache_salt`` of its requests, which SGLang seeds page hashes
with. Its name on disk and in reports is a digest of both, which does not reveal them; but who can
read it can confirm a guess, as with SGLang's page hashes, so a salt that is to be a secret must be
long and random.

SGLang appends the id of a LoRA adapter to ``extra_key``, so a request of the base model that sends
the id as its key would go by the adapter's. Requests go by keys of ours that tell the two apart
and the tenant of an adapter's pages from them.
"""

from __future__ import annotations

import hashlib
import secrets

from sglang_tiered.storage.base import NO_TENANT, TENANT_BYTES

__all__ = ["SECRET_BITS", "UNKNOWN_TENANT", "PurgedTenants", "key_of_request", "tenant_digest"]

SECRET_BITS = 62

_ADAPTER = "\x1fadapter\x1f"  # behind the last one: a LoRA adapter's id, or nothing

UNKNOWN_TENANT = b"\xff" * TENANT_BYTES
"""Of pages that reached the storage thread by a way that names no tenant; they go with every
purge, as they may be anybody's."""


def tenant_digest(extra_key: str | None, cache_salt: str | None) -> bytes:
    """The tenant of pages hashed under these; empty ones count as absent, as in SGLang."""
    if not extra_key and not cache_salt:
        return NO_TENANT
    state = hashlib.blake2b(digest_size=TENANT_BYTES, person=b"sgltiered-tenant")
    for part in (extra_key or "", cache_salt or ""):
        data = part.encode(errors="surrogatepass")
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def key_of_request(extra_key: str | None, lora_id: str | None) -> str | None:
    """What a request goes by whose ``extra_key`` is as SGLang makes it: a user's own key as it is,
    unless it could be taken for an adapter's."""
    if lora_id:
        return f"{(extra_key or '').removesuffix(lora_id)}{_ADAPTER}{lora_id}"
    return extra_key + _ADAPTER if extra_key and _ADAPTER in extra_key else extra_key


def _users_key(extra_key: str | None) -> str | None:
    """Of what a request goes by."""
    return extra_key.rpartition(_ADAPTER)[0] if extra_key and _ADAPTER in extra_key else extra_key


class PurgedTenants:
    """Those purged since the last reset of the tree, which needs an idle scheduler: until then they
    go by another ``extra_key``: their requests match nothing of before, and what the tree still
    holds of before matches nothing any more. Neither is stored meanwhile.

    Nothing can remove the nodes of one tenant from SGLang's tree; a key that no request uses again
    is as good until the tree is reset. Owned by the scheduler thread.
    """

    def __init__(self) -> None:
        self._purges: dict[bytes | None, str] = {}  # the mark of each tenant, of all under None
        self._token = ""
        self._num_purges = 0
        self.use_secret(secrets.randbits(SECRET_BITS))

    def use_secret(self, secret: int) -> None:
        """What no user can guess, so that no key of theirs is taken for one of ours. The same on
        every rank, as keys are compared by SGLang's checks of rank divergence. Before any purge."""
        assert not self._purges, "keys with the old secret are in use"
        self._token = f"{secret:016x}"

    def __bool__(self) -> bool:
        return bool(self._purges)

    def hide(self, tenant: bytes | None) -> None:
        """A tenant was purged, or all were."""
        self._num_purges += 1
        self._purges[tenant] = f"\x1f{self._token}-{self._num_purges}."

    def clear(self) -> None:
        """The tree was reset, with no request under way."""
        self._purges.clear()

    def tenant_of(self, extra_key: str | None, cache_salt: str | None) -> bytes:
        """Of what a request goes by, with and without marks, of all its adapters alike."""
        return tenant_digest(_users_key(self._original(extra_key)), cache_salt)

    def blocks(self, tenant: bytes) -> bool:
        """Whether pages of this tenant must not be stored now."""
        return tenant in self._purges or None in self._purges

    def key_of(self, extra_key: str | None, cache_salt: str | None) -> str | None:
        """The ``extra_key`` that a request goes by from now on."""
        if not self._purges:
            return extra_key
        tenant = self.tenant_of(extra_key, cache_salt)
        marks = [self._purges.get(None), self._purges.get(tenant)]
        mark = "".join(mark for mark in marks if mark is not None)
        return (self._original(extra_key) or "") + mark if mark else extra_key

    def _original(self, extra_key: str | None) -> str | None:
        if not extra_key or self._token not in extra_key:
            return extra_key
        head, *marked = extra_key.split("\x1f" + self._token)
        return (head + "".join(part.partition(".")[2] for part in marked)) or None
