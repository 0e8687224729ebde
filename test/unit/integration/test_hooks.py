"""Log lines that SGLang repeats per page come once a minute."""

from __future__ import annotations

import logging

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_tiered.integration import hooks


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


def test_no_target_is_hooked_twice() -> None:
    """Which of two is called first is said nowhere, and the second may lack what the first did."""
    assert HookRegistry._hooks
    assert not [target for target, found in HookRegistry._hooks.items() if len(found) > 1]
