"""A stack over a directory of objects that others delete from."""

from __future__ import annotations

from pathlib import Path

from kit.request_hooks import listed
from kit.runs import NAMESPACE, make_run, of
from kit.tiers import open_region, store
from kit.waiting import TIMEOUT_S
from sglang_tiered.remote_config import ObjectConfig
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.stack import TierStack

TENANT = b"a" * 16


def test_what_was_collected_is_not_durable(tmp_path: Path) -> None:
    """By a server of a smaller cap, or by hand: nobody lists what is gone for ten minutes."""
    settings = ObjectConfig(url=(tmp_path / "shared").as_uri(), staging_bytes=1 << 22)
    bucket = BucketEngine(settings, namespace=NAMESPACE)
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
