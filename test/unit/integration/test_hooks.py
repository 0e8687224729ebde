"""Log lines that SGLang repeats per page come once a minute; weight updates end a namespace."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager as SGLangUpdater,
)

from sglang_tiered.integration import hooks
from sglang_tiered.integration.attention import pod
from sglang_tiered.integration.cache.radix_cache import TieredRadixCache


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("name", logging.WARNING, "file", 1, message, (), None)


def test_repeated_message_passes_once_a_minute() -> None:
    now = [0.0]
    log_filter = hooks.RepeatFilter(("Write page",), clock=lambda: now[0])
    assert log_filter.filter(record("Write page to storage: 3 pages failed."))
    assert not log_filter.filter(record("Write page to storage: 9 pages failed."))
    assert log_filter.filter(record("something else"))
    now[0] = hooks.REPEAT_INTERVAL_S
    assert log_filter.filter(record("Write page to storage: 1 pages failed."))


class Updater(SimpleNamespace):
    """SGLang's, of a scheduler with tiers that notes whether stores go on after a change."""

    def __init__(
        self, patch: pytest.MonkeyPatch, *, is_idle: bool = True, is_empty: bool = True
    ) -> None:
        cache = TieredRadixCache.__new__(TieredRadixCache)
        cache.attn_cp_group = cache.attn_tp_group = None
        cache.tp_world_size = 1
        scheduler = SimpleNamespace(
            tree_cache=cache, _engine_paused=False, is_fully_idle=lambda ignore_waiting: is_idle
        )
        saver = SimpleNamespace(enabled=True)
        super().__init__(scheduler=scheduler, _session=None, memory_saver_adapter=saver)
        self.told: list[bool] = []

        def change_weights(_: Any, *, tree_is_empty: bool) -> None:
            self.told.append(tree_is_empty)

        patch.setattr(TieredRadixCache, "change_weights", change_weights)
        patch.setattr(TieredRadixCache, "is_empty", is_empty)


DONE, REFUSED = SimpleNamespace(success=True), SimpleNamespace(success=False)


@pytest.mark.parametrize("result", [DONE, REFUSED])
@pytest.mark.parametrize(
    ("is_idle", "is_empty"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_weight_update_reports_what_memory_holds(
    monkeypatch: pytest.MonkeyPatch, result: Any, is_idle: bool, is_empty: bool
) -> None:
    updater = Updater(monkeypatch, is_idle=is_idle, is_empty=is_empty)
    hooks._after_weight_update(result, updater, SimpleNamespace())
    assert updater.told == [is_idle and is_empty]


@pytest.mark.parametrize(("draft_fails", "is_complete"), [(False, True), (True, False)])
def test_refused_flush_leaves_the_update_complete(draft_fails: bool, is_complete: bool) -> None:
    """Prefill answered 503 until the update was repeated, flushed or not."""
    request = UpdateWeightFromDiskReqInput(model_path="new", flush_cache=True)
    updater = SGLangUpdater.__new__(SGLangUpdater)
    updater.scheduler = SimpleNamespace(
        record_weight_version_change=lambda **_: None,
        is_fully_idle=lambda **_: False,
        _engine_paused=False,
        tree_cache=object(),
    )
    updater.metrics_collector = updater._session = None
    updater.flush_cache = lambda **_: False
    updater.tp_worker = worker(is_loaded=True)
    updater.draft_worker = worker(is_loaded=not draft_fails, role="draft")
    result = updater.update_weights_from_disk(request)  # with our hooks, as in a server
    assert not result.success and "not flushed" in result.message
    assert hooks._update_of(result, updater, request).is_complete is is_complete
    later = UpdateWeightFromDiskReqInput(model_path="new", flush_cache=True)
    assert not hooks._update_of(REFUSED, updater, later).is_complete, "of another update"


def worker(*, is_loaded: bool, role: str = "target") -> Any:
    def load(*_: Any, **__: Any) -> tuple[bool, str]:
        return is_loaded, "told"

    runner = SimpleNamespace(weight_updater=SimpleNamespace(update_weights_from_disk=load))
    return SimpleNamespace(weight_update_runners=lambda: [(role, runner)])


def test_session_that_flushes_nothing_ends_with_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is open nothing is stored, whoever writes the weights."""
    updater = Updater(monkeypatch)
    updater._session = object()
    hooks._after_begin(DONE, updater, SimpleNamespace())
    hooks._after_session_update(REFUSED, updater, SimpleNamespace(flush_cache=True))
    updater._session = None
    hooks._after_session_update(DONE, updater, SimpleNamespace())
    assert updater.told == [False, True, True]


def test_refused_update_call_costs_nothing_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updater = Updater(monkeypatch)
    hooks._after_session_update(REFUSED, updater, SimpleNamespace())
    updater._session = object()
    hooks._after_begin(REFUSED, updater, SimpleNamespace())
    assert updater.told == []


@pytest.mark.parametrize(
    ("tags", "saver", "kept", "told"),
    [
        (None, True, False, [False]),
        (["weights"], True, False, [False]),
        (["kv_cache"], True, False, []),
        (["weights"], True, True, []),
        (["weights"], False, False, []),
    ],
)
def test_kv_of_released_weights_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, tags: Any, saver: bool, kept: bool, told: list[bool]
) -> None:
    updater = Updater(monkeypatch)
    updater.memory_saver_adapter.enabled = saver
    features = SimpleNamespace(enable_weights_cpu_backup=kept)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(TieredRadixCache, "quiesce", lambda _: True)
    hooks._around_release(lambda *_: None, updater, SimpleNamespace(tags=tags))
    assert updater.told == told


def test_untiered_weight_update_is_left_alone() -> None:
    scheduler = SimpleNamespace(
        tree_cache=object(), _engine_paused=False, is_fully_idle=lambda **_: True
    )
    updater = SimpleNamespace(scheduler=scheduler, _session=None)
    hooks._after_weight_update(SimpleNamespace(success=True), updater, SimpleNamespace())


def test_server_info_shows_pod_only_where_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = SimpleNamespace(tree_cache=object())
    monkeypatch.setattr(pod.PodAttention.statistics, "serving", False)
    result = SimpleNamespace(internal_state={})
    assert hooks._after_internal_state(result, scheduler, None).internal_state == {}
    monkeypatch.setattr(pod.PodAttention.statistics, "serving", True)
    shown = hooks._after_internal_state(result, scheduler, None).internal_state
    assert shown["sglang_tiered_pod"]["forwards"] == 0
