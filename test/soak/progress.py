"""How the live soak tells what it does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from life import Record

__all__ = ["say", "summary"]

GROUPS = ("rounds", "requests", "tokens found", "actions", "faults", "ties")


def say(record: Record, line: str) -> None:
    totals = ", ".join(f"{record.total(group)} {group}" for group in GROUPS[:2])
    print(f"{time.strftime('%H:%M:%S')} {line} ({totals})", flush=True)


def summary(record: Record) -> None:
    for group in GROUPS:
        print(f"{group}: {record.told(group)}", flush=True)
