"""A tenant's digest tells its parts apart; the purged keeps a purged tenant from its old nodes."""

from __future__ import annotations

import pytest

from sglang_tiered.integration.admin.http_api import PurgeRequestError, parse_purge
from sglang_tiered.integration.identity.tenants import UNKNOWN_TENANT, PurgedTenants, tenant_digest
from sglang_tiered.storage.base import NO_TENANT, TENANT_BYTES

A = tenant_digest("a", "salt")


def test_tenants_differ_wherever_key_or_salt_do() -> None:
    parts = ["", "a", "b", "ab", "a\0", "\0", "\udcff", "\N{SNOWMAN}"]
    digests = {tenant_digest(key, salt) for key in parts for salt in parts}
    assert len(digests) == len(parts) ** 2
    assert {len(digest) for digest in digests} == {TENANT_BYTES}
    assert UNKNOWN_TENANT not in digests


def test_absent_and_empty_are_no_tenant() -> None:
    assert tenant_digest(None, None) == tenant_digest("", "") == NO_TENANT
    assert tenant_digest("a", None) == tenant_digest("a", "") != NO_TENANT


def test_the_digest_of_a_tenant_never_changes() -> None:
    """It is on disk."""
    assert tenant_digest("acme", "s3cret").hex() == "0b8a913a166c607b8510e0cd2028e85a"


def test_without_a_purge_keys_stay_as_they_are() -> None:
    purged = PurgedTenants()
    assert not purged
    assert [purged.key_of(key, None) for key in (None, "", "a")] == [None, "", "a"]
    assert not purged.blocks(A)


def test_a_purged_tenant_goes_by_another_key_and_stays_itself() -> None:
    purged = PurgedTenants()
    purged.hide(A)
    first = purged.key_of("a", "salt")
    assert first != "a"
    assert purged.tenant_of(first, "salt") == A
    assert purged.blocks(A)
    assert purged.key_of(first, "salt") == first, "a request may be asked about twice"
    assert purged.key_of("b", "salt") == "b"
    assert not purged.blocks(tenant_digest("b", "salt"))
    purged.hide(A)
    assert purged.key_of(first, "salt") not in {"a", first}, "purged again: another key again"
    purged.clear()
    assert purged.key_of("a", "salt") == "a"
    assert purged.tenant_of(first, "salt") == A


def test_a_purge_of_everything_concerns_all_and_none() -> None:
    purged = PurgedTenants()
    purged.hide(None)
    nobody = purged.key_of(None, None)
    assert nobody
    assert purged.tenant_of(nobody, None) == NO_TENANT
    both = purged.key_of("a", "salt")
    purged.hide(A)
    assert purged.key_of(both, "salt") not in {"a", both}
    assert purged.tenant_of(purged.key_of(both, "salt"), "salt") == A
    assert purged.blocks(A) and purged.blocks(NO_TENANT)


def test_what_sglang_appends_to_a_marked_key_still_counts() -> None:
    purged = PurgedTenants()
    purged.hide(A)
    assert purged.tenant_of(f"{purged.key_of('a', 'salt')}|ns", "salt") == tenant_digest(
        "a|ns", "salt"
    )


def test_a_users_key_is_never_taken_for_a_mark() -> None:
    purged, other = PurgedTenants(), PurgedTenants()
    other.hide(A)
    forged = other.key_of("a", "salt")
    assert purged.tenant_of(forged, "salt") != A


@pytest.mark.parametrize(
    "body",
    [None, [], "all", {}, {"all": False}, {"all": 1, "extra_key": "a"}, {"extra_key": 5},
     {"cache_salt": ""}, {"tenant": "a"}],
)  # fmt: skip
def test_a_purge_that_does_not_say_what_it_means_is_refused(body: object) -> None:
    with pytest.raises(PurgeRequestError):
        parse_purge(body)


@pytest.mark.parametrize(
    "body",
    [{"all": True}, {"extra_key": "a"}, {"cache_salt": "s"}, {"extra_key": "a", "cache_salt": "s"}],
)
def test_a_clear_purge_is_taken_as_it_is(body: dict[str, object]) -> None:
    assert parse_purge(body) == body


def test_ranks_with_one_secret_use_the_same_keys() -> None:
    """SGLang's check of rank divergence ends a server whose ranks match other keys."""
    ranks = PurgedTenants(), PurgedTenants()
    for rank in ranks:
        rank.use_secret(1234)
        rank.hide(tenant_digest("a", None))
    first, second = (rank.key_of("a", None) for rank in ranks)
    assert first == second != "a"
