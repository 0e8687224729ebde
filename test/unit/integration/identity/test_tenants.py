"""A tenant's digest tells its parts apart; a quarantine keeps a purged tenant from its old
nodes."""

from __future__ import annotations

from array import array

import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_tiered.integration.identity import tenants
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT, HiddenTenants, tenant_digest
from sglang_tiered.storage.base import NO_TENANT, TENANT_BYTES

A = tenant_digest("a", "salt")


@pytest.fixture
def purged() -> HiddenTenants:
    return HiddenTenants()


def test_tenants_differ_wherever_key_or_salt_do() -> None:
    parts = ["", "a", "b", "ab", "a\0", "\0", "\udcff", "\N{SNOWMAN}"]
    digests = {tenant_digest(key, salt) for key in parts for salt in parts}
    assert len(digests) == len(parts) ** 2
    assert {len(digest) for digest in digests} == {TENANT_BYTES}
    assert UNKNOWN_TENANT not in digests
    assert tenant_digest(None, None) == tenant_digest("", "") == NO_TENANT
    assert tenant_digest("a", None) == tenant_digest("a", "") != NO_TENANT


def test_the_digest_of_a_tenant_never_changes() -> None:
    """It is on disk."""
    assert tenant_digest("acme", "s3cret").hex() == "0b8a913a166c607b8510e0cd2028e85a"


def test_purged_tenant_gets_another_key_and_keeps_identity(purged: HiddenTenants) -> None:
    purged.quarantine(A)
    first = purged.key_of("a", "salt")
    assert first != "a"
    assert purged.tenant_of(first, "salt") == A
    assert purged.is_hidden("a", "salt") and not purged.is_hidden(first, "salt")
    assert purged.key_of(first, "salt") == first, "a request may be asked about twice"
    assert purged.key_of("b", "salt") == "b"
    assert not purged.is_hidden("b", "salt")
    purged.quarantine(A)
    assert purged.key_of(first, "salt") not in {"a", first}, "purged again: another key again"
    assert purged.is_hidden(first, "salt")
    purged.release_all()
    assert purged.key_of("a", "salt") == purged.key_of(first, "salt") == "a"
    assert purged.tenant_of(first, "salt") == A


def test_a_purge_of_everything_concerns_all_and_none(purged: HiddenTenants) -> None:
    purged.quarantine(None)
    untenanted = purged.key_of(None, None)
    assert untenanted
    assert purged.tenant_of(untenanted, None) == NO_TENANT
    both = purged.key_of("a", "salt")
    purged.quarantine(A)
    assert purged.key_of(both, "salt") not in {"a", both}
    assert purged.tenant_of(purged.key_of(both, "salt"), "salt") == A
    assert purged.is_hidden(both, "salt") and purged.is_hidden("a", "salt")
    assert purged.is_hidden(None, None) and not purged.is_hidden(untenanted, None)


def test_sglangs_suffix_of_a_marked_key_counts(purged: HiddenTenants) -> None:
    purged.quarantine(A)
    marked = f"{purged.key_of('a', 'salt')}|ns"
    assert purged.tenant_of(marked, "salt") == tenant_digest("a|ns", "salt")


def test_user_key_is_never_read_as_mark() -> None:
    purged, other = HiddenTenants(), HiddenTenants()
    other.quarantine(A)
    forged = other.key_of("a", "salt")
    assert purged.tenant_of(forged, "salt") != A
    keys = (RadixKey(array("q", range(16)), key) for key in ("a", "a\x1f1234-1."))
    own, another = (get_storage_hash_str(key, None, page_size=16) for key in keys)
    assert own != another


def test_hidden_tenants_are_bounded_in_number(
    purged: HiddenTenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "MAX_HIDDEN_TENANTS", 3)
    for number in range(3):
        purged.quarantine(tenant_digest(str(number), None))
    assert not purged.is_hidden("other", None)
    purged.quarantine(tenant_digest("3", None))
    assert all(purged.is_hidden(key, None) for key in ("0", "3", "other"))
    assert len(purged._hidden) == 1


def test_ranks_with_one_secret_use_the_same_keys() -> None:
    """SGLang's check of rank divergence ends a server whose ranks match other keys."""
    ranks = HiddenTenants(), HiddenTenants()
    for rank in ranks:
        rank.use_secret(1234)
        rank.quarantine(tenant_digest("a", None))
    first, second = (rank.key_of("a", None) for rank in ranks)
    assert first == second != "a"
