"""What announces pages of lower tiers ends no scheduler, and ends with its cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import StorageMedium

from sglang_tiered.integration.observe.kv_events import TierEvents


class EmptyCore:
    """A tree whose nodes were all evicted."""

    is_eagle = False

    def collect_path_info(self, node_ids: list[int]) -> Any:
        raise KeyError(node_ids[0])


@pytest.fixture
def events() -> TierEvents:
    params: Any = SimpleNamespace(
        page_size=4, dynamo_kv_event_format=False, kv_event_lora_names=None
    )
    core: Any = EmptyCore()
    return TierEvents(core, {StorageMedium.DISK: lambda keys: [True] * len(keys)}, params)


def test_node_that_was_evicted_ends_the_scheduler(events: TierEvents) -> None:
    events.announce_node(77)
    assert events.take_events() == []


def test_thread_outlives_the_cache(events: TierEvents) -> None:
    events.start()
    thread = events._thread
    assert thread is not None and thread.is_alive()
    events.close()
    assert not thread.is_alive()
    events.close()
