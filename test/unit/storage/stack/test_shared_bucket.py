"""A stack over a bucket that others use too: what they erased is applied once, by pieces, and what
they deleted is copied again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bucket_engines import open_engine

from kit.request_hooks import listed
from kit.runs import make_run, of
from kit.tiers import open_region, store
from kit.waiting import TIMEOUT_S, eventually
from sglang_tiered.storage.base import PIECE_KEYS, Erasure
from sglang_tiered.storage.promises import ended, is_true
from sglang_tiered.storage.stack import TierStack

TENANT = b"t" * 16
MANY = tuple(number.to_bytes(32, "big") for number in range(2 * PIECE_KEYS + 1))


def test_no_piece_has_the_id_of_the_whole() -> None:
    what = Erasure(MANY)
    pieces = what.pieces
    assert [len(each.keys or ()) for each in pieces] == [PIECE_KEYS, PIECE_KEYS, 1]
    assert len({what.id, *(each.id for each in pieces)}) == 4
    assert [each.id for each in pieces] == [each.id for each in Erasure(MANY, None, what.id).pieces]
    few = Erasure(MANY[:PIECE_KEYS])
    assert [each.id for each in few.pieces] == [few.id]


def test_memory_hears_what_the_bucket_knew_before(tmp_path: Path) -> None:
    """As when tiers are attached to a running server, and another one has purged meanwhile."""
    url = (tmp_path / "bucket").as_uri()
    other = open_engine(url)
    assert is_true(other.erase(Erasure(None, TENANT)), TIMEOUT_S)
    other.close()
    bucket = open_engine(url)
    assert bucket.refresh(TIMEOUT_S)
    heard: list[Any] = []
    stack = TierStack(
        open_region(tmp_path / "nvme"),
        [bucket],
        on_told=lambda what: heard.append(what.tenant) or ended(True),  # type: ignore[func-returns-value]
    )
    eventually(lambda: heard == [TENANT], "memory did not hear of it")
    stack.close()


def test_what_was_collected_is_not_durable(tmp_path: Path) -> None:
    """By a server of a smaller cap, or by hand: nobody lists what is gone for ten minutes."""
    bucket = open_engine((tmp_path / "shared").as_uri())
    stack, run = TierStack(open_region(tmp_path / "own"), [bucket]), make_run(1, [8192] * 4)
    store(stack, of(TENANT, run))
    assert stack.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    for _ in range(2):
        paths = listed(bucket, bucket._state.layout.pages)
        assert len(paths) == 4, "what NVMe holds goes up again"
        bucket._requests.delete(paths)
        assert stack.flush_to_bucket(run.keys, TIMEOUT_S) == [True] * 4
    bucket._requests.delete(listed(bucket, bucket._state.layout.pages))
    assert is_true(stack.nvme.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert stack.flush_to_bucket(run.keys, TIMEOUT_S) == [False] * 4
    stack.close()
