"""The whole cache over a real store: tiers that are detached and attached, weights that change."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from page_calls import load_pages
from platform_process import environment, run
from prometheus_client import CollectorRegistry
from sglang.srt.disaggregation.role_switch import _release_prefix_cache_for_role_switch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from small_cache import (
    PAGE,
    TOKENS,
    attach,
    broken_shard,
    compute,
    flush,
    keys_of,
    settle,
    step,
    store,
)
from zygote import Zygotes

from kit.process_stats import FULL
from sglang_tiered.integration.observe.kv_events import TierEvents, tiers_of
from sglang_tiered.integration.observe.stats import MetricsExporter
from sglang_tiered.metrics import METRICS

DEADLINE_S = 240.0


LONGER = [*TOKENS, *range(9000, 9000 + PAGE)]


def attach_well(cache: Any) -> None:
    attached, message = attach(cache)
    assert attached, message


def attach_again(cache: Any) -> None:
    assert cache.detach_storage_backend()[0]
    assert cache.storage is None
    attach_well(cache)


def load(cache: Any, tokens: list[int]) -> list[bool]:
    hashes = keys_of(tokens)
    host = cache.cache_controller.mem_pool_host.anchor_entry.host_pool
    pages = host.alloc(len(tokens))
    loaded: list[bool] = load_pages(cache.storage, hashes, pages)
    host.free(pages)
    return loaded


def test_switched_role_keeps_every_page_of_nvme(
    cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What still waits for its store when SGLang resets the tree would be lost."""
    with monkeypatch.context() as slow:
        slow.setattr(cache.tiering.stores, "_begin", lambda _: None)
        compute(cache, TOKENS)
        step(cache, lambda: not cache.ongoing_write_through)
        assert cache.tiering.awaits_stores, "SGLang takes it for idle"
    step(cache, lambda: not cache.tiering.awaits_stores)
    settle(cache)
    scheduler = SimpleNamespace(
        disable_radix_cache=False,
        tree_cache=cache,
        req_to_token_pool=SimpleNamespace(clear=lambda: None),
        token_to_kv_pool_allocator=cache.token_to_kv_pool_allocator,
    )
    _release_prefix_cache_for_role_switch(scheduler)
    assert cache.is_empty
    assert all(load(cache, TOKENS))
    assert cache.storage.region_engine.stats().num_pages_erased == 0


def test_metrics_and_events_follow_the_attached_storage(cache: Any) -> None:
    store(cache, TOKENS)
    told: list[Any] = []
    cache._exporter = SimpleNamespace(
        export=lambda: None, export_now=lambda: told.append(cache.process_stats().get("nvme"))
    )
    params: Any = SimpleNamespace(
        page_size=PAGE, dynamo_kv_event_format=False, kv_event_lora_names=None
    )
    cache._events = TierEvents(cache.tree_core, tiers_of(cache.storage), params)
    attach_again(cache)
    gone, again = told
    assert gone is None and again.num_pages_stored == 0, "their counts begin at zero"
    ((medium, _, holds),) = cache._events._tiers
    assert holds([bytes.fromhex(text) for text in keys_of(TOKENS)]) == [True] * 4
    asked: list[Any] = []
    cache._events.use_tiers({medium: lambda keys: asked.append(keys) or [True] * len(keys)})
    step(cache, lambda: bool(asked))


def test_stored_node_is_announced_and_a_flush_told(cache: Any) -> None:
    told: list[Any] = []
    cache._events = SimpleNamespace(
        announce_node=told.append, tree_was_reset=lambda: told.append("reset"), step=list
    )
    compute(cache, TOKENS)
    step(cache, lambda: cache.ongoing_backup)
    nodes = [node_id for node_id, _ in cache.ongoing_backup.values()]
    step(cache, lambda: not cache.ongoing_backup)
    assert told == nodes
    cache.reset()
    assert told == [*nodes, "reset"]


def test_old_weights_kv_is_not_stored_after_attaching(cache: Any) -> None:
    compute(cache, TOKENS)
    settle(cache)
    assert cache.detach_storage_backend()[0]
    cache.change_weights(tree_is_empty=False)
    attach_again(cache)
    compute(cache, LONGER)
    settle(cache)
    assert cache.process_stats()["nvme"].num_pages_stored == 0
    flush(cache)
    store(cache, TOKENS)


def test_failed_attach_can_be_repeated_later(cache: Any, tmp_path: Path) -> None:
    store(cache, TOKENS)
    flush(cache)
    assert cache.detach_storage_backend()[0]
    with broken_shard(tmp_path / "kv", rank=0):
        for _ in range(2):  # a second attempt is no update of policies
            attached, message = attach(cache)
            assert not attached and "cannot be used as a store" in message
            assert cache.storage is None
            step(cache, lambda: False, steps=3)
            compute(cache, TOKENS)
            settle(cache)
            flush(cache)
    attach_well(cache)
    assert load(cache, TOKENS) == [True] * 4
    store(cache, LONGER)


def test_ranks_attach_tiers_and_load_together(zygotes: Zygotes, tmp_path: Path) -> None:
    """Else their next exchange, longer with the tiers, ends the server, or loads wait for ever."""
    more = environment()
    said = run(zygotes, "attaching_rank.py", str(tmp_path), timeout_s=DEADLINE_S, **more)
    ranks = said["ranks"]
    for rank in ranks:
        assert [attached for attached, _ in rank["refused"]] == [False, False]
        assert rank["held while refused"] == [False, False]
        assert rank["write policy"] == ["write_through"] * 2
        assert rank["attached"][0], rank["attached"][1]
        assert rank["differing"] == ranks[0]["differing"]
        assert not rank["differing"][0]
    steps = [rank["steps until its load"] for rank in ranks]
    assert steps[::2] == steps[1::2] and min(steps) > 40, "of the ranks of a pair"
    assert "cannot be used as a store" in ranks[0]["refused"][0][1], "its own"
    for rank in (ranks[0], *ranks[2:]):
        assert "on rank 1, whose log says why" in rank["refused"][1][1]


def test_pipeline_stage_refuses_to_attach_tiers_late(cache: Any) -> None:
    assert cache.detach_storage_backend()[0]
    cache.pp_size = 2
    attached, message = attach(cache)
    assert not attached and "at the start only" in message
    assert cache.storage is None


def test_kv_in_memory_during_updates_waits_for_flush(cache: Any) -> None:
    compute(cache, TOKENS)
    settle(cache)
    cache.evict(EvictParams(num_tokens=len(TOKENS)))
    assert cache.total_size() == (0, 0), "the test wants it in host memory alone"
    assert not cache.is_empty
    flush(cache)
    assert cache.is_empty


def test_paths_of_the_table_lead_somewhere(cache: Any) -> None:
    """A part that a snapshot lacks gives no sample, and nobody would miss it."""
    stats = {**FULL, **cache.process_stats()}
    stats["holdings"] |= {"object": stats["holdings"]["nvme"]}
    for source in (source for metric in METRICS for source in metric.sources):
        value: Any = stats
        for name in source.field.split("."):
            assert not isinstance(value, dict) or name in value, source.field
            value = value[name] if isinstance(value, dict) else getattr(value, name)
            if value is None:  # as of a tier that nobody has read
                break


def test_detached_tiers_serve_and_hold_nothing(cache: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last statistics stood there, until they were attached again."""
    registry = CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        made = partial(getattr(prometheus_client, kind), registry=registry)
        monkeypatch.setattr(prometheus_client, kind, made)
    now = [0.0]
    cache._exporter = MetricsExporter(cache.process_stats, lambda: now[0], labels={"rank": "0"})

    def value(name: str, tier: str) -> float | None:
        now[0] += 1.0
        step(cache, lambda: False, steps=3)
        return registry.get_sample_value(f"sglang_tiered_{name}", {"tier": tier, "rank": "0"})

    store(cache, TOKENS)
    assert value("tier_healthy", "nvme") == 1.0
    assert value("tier_held_tokens", "nvme") == len(TOKENS)
    flush(cache)
    held = value("tier_held_tokens", "device")
    assert cache.detach_storage_backend()[0]
    assert value("tier_healthy", "nvme") == 0.0
    of_tier = ("held_tokens", "held_bytes", "capacity_bytes", "pages", "physical_bytes")
    assert {value(f"tier_{name}", "nvme") for name in of_tier} == {0.0}
    compute(cache, TOKENS)
    assert value("tier_held_tokens", "device") == held + len(TOKENS), "memory is still told of"
    attach_well(cache)
    assert value("tier_healthy", "nvme") == 1.0
    assert value("tier_held_tokens", "nvme") == len(TOKENS)
