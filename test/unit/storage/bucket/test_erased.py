"""Records of erasures: what they say of a page, damaged ones too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kit.request_hooks import before, refuse
from kit.waiting import TIMEOUT_S
from sglang_tiered.checksummed import seal
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.bucket import erased as records
from sglang_tiered.storage.bucket.erased import BucketErasures, Record

A, B, N, M = b"a" * 16, b"b" * 16, b"n" * 32, b"m" * 32


@pytest.mark.parametrize(
    ("what", "namespace", "dead"),
    [
        (Erasure(tenant=A), b"", lambda of, tenant, key: tenant == A),
        (Erasure.of([b"k" * 32]), b"", lambda of, tenant, key: key == b"k" * 32),
        (Erasure(), N, lambda of, tenant, key: of == N),
    ],
)
def test_a_record_kills_what_did_not_know_it(
    what: Erasure, namespace: bytes, dead: Callable[[bytes, bytes, bytes], bool]
) -> None:
    erased = BucketErasures()
    erased.add(Record(5, what, namespace, "5", 0.0))
    erased.add(Record(3, Erasure(what.keys, what.tenant), namespace, "3", 0.0))
    for page in [(of, t, k) for of in (N, M) for t in (A, B) for k in (b"k" * 32, b"l" * 32)]:
        assert erased.kills(*page, 4) == erased.hides(*page, 4) == dead(*page)
        assert not erased.kills(*page, 5)
    assert erased.top == 5
    erased.keep_only(6)
    assert not erased.kills(N, A, b"k" * 32, 0)


def test_too_many_keys_hide_more_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MAX_KEYS", 4)
    erased = BucketErasures()

    def add(numbers: range) -> None:
        for number in numbers:
            what = Erasure.of([bytes([number % 40]) * 32])
            erased.add(Record(number, what, b"", f"{number}", 0.0))

    add(range(1, 53))
    for number in range(13, 53):
        key = bytes([number % 40]) * 32
        assert erased.kills(N, A, key, number - 1)
        assert not erased.hides(N, A, key, number)
    assert not erased.hides(N, A, b"x" * 32, 1), "keys before the last are known by 8 bytes"
    assert not erased.hides(N, A, bytes([20]) * 8 + b"x" * 24, 1), "or a page goes for another"
    erased.keep_only(20)
    assert [erased.kills(N, A, bytes([n]) * 32, 0) for n in (15, 25, 5)] == [False, True, True]
    monkeypatch.setattr(records, "_MAX_HASHES", 4)
    erased = BucketErasures()
    add(range(1, 11))
    for number in range(1, 11):
        assert erased.hides(N, A, bytes([number]) * 32, number - 1)
    assert erased.hides(N, A, b"x" * 32, 1), "which it cannot tell from those"
    assert not erased.kills(N, A, b"x" * 32, 1), "nothing is deleted for it"
    assert not erased.hides(N, A, b"x" * 32, 10)


def test_failing_readers_skip_no_merged_record(make_engine: Any) -> None:
    """What is read behind one that a collector merged says nothing of it."""
    a, keys, merges = make_engine(), [bytes([n]) * 32 for n in range(5)], list[bool]()
    assert a.refresh(TIMEOUT_S)
    whats = [Erasure.of([key]) for key in keys]
    paths = [records.record_path(number, what, N) for number, what in enumerate(whats, 1)]
    for path, what in zip(paths, whats, strict=True):
        a._requests.put(path, records.record_data(what))

    def merge() -> None:
        entries = [(n, bytes([n]) * 16, 0.0, keys[n - 1]) for n in (1, 2)]
        path = f"{records.ERASED}/{2:012x}-{'ab' * 16}-m{1:012x}"
        a._requests.put(path, seal((entries,)))
        a._requests.delete(paths[:2])
        merges.append(True)

    before(a, "get", merge, paths[1])
    before(a, "listing", lambda: refuse() if merges else None, records.ERASED, times=2)
    assert not a.refresh(TIMEOUT_S)
    assert a.refresh(TIMEOUT_S) and merges
    with a._state.lock:
        assert all(a._state.erased.kills(N, A, key, n) for n, key in enumerate(keys))


def merged(number: int) -> bytes:
    return seal(([(number, b"i" * 16, 0.0, b"k" * 32)],))


@pytest.mark.parametrize(
    ("named", "data"),
    [
        *((f"m{1:012x}", merged(number)) for number in (0, 9, 1 << 31)),
        *((named, b"") for named in ("n" + "0" * 63, "t" + "0" * 31, "m0", "z")),
    ],
)
def test_a_damaged_record_hides_all_that_is_older(
    make_engine: Any, named: str, data: bytes
) -> None:
    """It stops no listing, or erasures of other servers would not be heard of any more. Nor does
    one that names numbers beyond its own: those of all later ones would go on from there."""
    a = make_engine()
    a._requests.put(f"{records.ERASED}/{8:012x}-{'ab' * 16}-{named}", data)
    assert a.refresh(TIMEOUT_S)
    with a._state.lock:
        assert a._state.erased.top == 8
        assert a._state.erased.hides(N, A, b"x" * 32, 7), "what it said is unknown"
        assert not a._state.erased.kills(N, A, b"x" * 32, 7), "nothing is deleted for it"
        assert not a._state.erased.hides(N, A, b"x" * 32, 8)


def test_a_record_beyond_its_bound_is_not_read(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write could fill the memory of all."""
    a = make_engine()
    monkeypatch.setattr(records, "_MAX_RECORD_BYTES", 8)
    a._requests.put(records.record_path(1, Erasure.of([b"k" * 32]), N), b"x" * 9)
    monkeypatch.setattr(a._requests, "whole", pytest.fail)
    assert a.refresh(TIMEOUT_S)
    with a._state.lock:
        assert a._state.erased.hides(N, A, b"x" * 32, 0)
