"""Requests are refused when they would be late, and never while a server rests."""

from __future__ import annotations

import pytest

from sglang_tiered.policy.routing import retry_after_s


@pytest.mark.parametrize(
    ("limit_s", "predicted_s", "queue_s", "after_s"),
    [
        (2.0, 2.0, 10.0, None),
        (2.0, 5.5, 10.0, 4),
        (2.0, 5.5, 0.5, 1),
        (2.0, 5.5, 0.0, None),
        (2.0, float("inf"), float("inf"), 60),
        (2.0, 1e6, 1e6, 60),
    ],
)
def test_late_requests_come_again_when_queues_are_shorter(
    limit_s: float, predicted_s: float, queue_s: float, after_s: int | None
) -> None:
    assert retry_after_s(limit_s, predicted_s, queue_s) == after_s
