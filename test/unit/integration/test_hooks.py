"""Log lines that SGLang repeats per page come once a minute."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookRegistry


def test_no_target_is_hooked_twice() -> None:
    """Which of two is called first is said nowhere, and the second may lack what the first did."""
    assert HookRegistry._hooks
    assert not [target for target, found in HookRegistry._hooks.items() if len(found) > 1]
