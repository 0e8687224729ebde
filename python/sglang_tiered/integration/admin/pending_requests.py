"""``PendingRequests``: what a scheduler process has begun for askers that poll until it is done."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

__all__ = ["PendingRequests"]

MAX_PENDING = 256

Work = TypeVar("Work")


class PendingRequests(OrderedDict[str, Work]):
    """Work by the id that its asker chose. Beyond ``MAX_PENDING`` the oldest is dropped."""

    def __setitem__(self, number: str, work: Work) -> None:
        super().__setitem__(number, work)
        if len(self) > MAX_PENDING:
            self.popitem(last=False)
