"""Log lines that SGLang repeats per page come once a minute; weight updates end a namespace."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_tiered.integration import hooks, pod_backend
from sglang_tiered.integration.radix_cache import TieredRadixCache


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


@pytest.mark.parametrize(
    ("flush", "success", "flushed"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_weight_update_is_reported_with_what_the_tree_still_holds(
    monkeypatch: pytest.MonkeyPatch, flush: bool, success: bool, flushed: bool
) -> None:
    told: list[bool] = []

    def change_weights(self: Any, *, tree_was_flushed: bool) -> None:
        told.append(tree_was_flushed)

    monkeypatch.setattr(TieredRadixCache, "change_weights", change_weights)
    cache = TieredRadixCache.__new__(TieredRadixCache)
    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=cache))
    hooks._after_weight_update(
        SimpleNamespace(success=success), updater, SimpleNamespace(flush_cache=flush)
    )
    assert told == [flushed]


def test_weight_update_of_an_untiered_server_is_left_alone() -> None:
    updater = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=object()))
    hooks._after_weight_update(SimpleNamespace(success=True), updater, SimpleNamespace())


def test_server_info_shows_what_the_pod_backend_served_only_where_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = SimpleNamespace(tree_cache=object())
    monkeypatch.setattr(pod_backend.STATISTICS, "serving", False)
    result = SimpleNamespace(internal_state={})
    assert hooks._after_internal_state(result, scheduler, None).internal_state == {}
    monkeypatch.setattr(pod_backend.STATISTICS, "serving", True)
    shown = hooks._after_internal_state(result, scheduler, None).internal_state
    assert shown["sglang_tiered_pod"]["forwards"] == 0
