"""Two stacks over one directory of objects: what one stored the other serves and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.request_hooks import listed
from kit.runs import NAMESPACE, make_run, of
from kit.tiers import loads, open_region, store
from kit.waiting import TIMEOUT_S, drained, eventually
from sglang_tiered.object_config import ObjectConfig
from sglang_tiered.storage.base import Erasure, Tier
from sglang_tiered.storage.bucket import BucketEngine
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.stack import TierStack
from sglang_tiered.storage.stack.tiers import Span

TENANT = b"a" * 16
RUN = of(TENANT, make_run(1, [8192] * 4))
KEYS = RUN.keys


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    def open_engine(name: str) -> TierStack:
        url = (tmp_path / "shared").as_uri()
        settings = ObjectConfig(url=url, staging_bytes=1 << 22, num_connections=2)
        bucket = BucketEngine(settings, namespace=NAMESPACE)
        return TierStack(open_region(tmp_path / name), [bucket])

    made = open_engine("first"), open_engine("second")
    yield made
    for engine in made:
        assert drained(engine, TIMEOUT_S)
        engine.close()


def test_what_one_server_flushed_another_serves_and_keeps(servers: tuple[Any, Any]) -> None:
    first, second = servers
    store(first, RUN)
    assert first.flush_to_bucket(KEYS, TIMEOUT_S) == [True] * 4
    first.close()
    assert second.bucket.refresh(TIMEOUT_S)
    assert second.lookup_spans(KEYS) == [Span(Tier.OBJECT, 4)]
    loads(second, RUN, tenant=TENANT)
    eventually(lambda: second.stack_stats().num_promoted == 4, "nothing was promoted")
    assert second.lookup_spans(KEYS) == [Span(Tier.NVME, 4)]
    assert [usage.tenant for usage in second.nvme.tenants(9)] == [TENANT]


def test_what_was_collected_is_not_durable(servers: tuple[Any, Any]) -> None:
    """By a server of a smaller cap, or by hand: nobody lists what is gone for ten minutes."""
    first, _ = servers
    store(first, RUN)
    assert first.flush_to_bucket(KEYS, TIMEOUT_S) == [True] * 4
    for _ in range(2):
        paths = listed(first.bucket, first.bucket._state.layout.pages)
        assert len(paths) == 4, "what NVMe holds goes up again"
        first.bucket._requests.delete(paths)
        assert first.flush_to_bucket(KEYS, TIMEOUT_S) == [True] * 4
    first.bucket._requests.delete(listed(first.bucket, first.bucket._state.layout.pages))
    assert is_true(first.nvme.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
    assert first.flush_to_bucket(KEYS, TIMEOUT_S) == [False] * 4
