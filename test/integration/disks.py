"""How the NVMe tiers of servers behave, as their ``slow_disk`` reads it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SLOW_DISK = Path(__file__).resolve().parent / "slow_disk"


class Disk:
    """Of the servers whose ``SLOW_DISK_FILE`` is this file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def order(self, **orders: Any) -> None:
        """From now on; nothing is a disk in order."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self.file)

    @contextlib.contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        self.order(read_s=seconds)
        try:
            yield
        finally:
            self.order()
