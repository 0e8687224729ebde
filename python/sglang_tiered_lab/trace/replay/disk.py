"""The time an NVMe device takes: loads in order of request, stores in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_tiered_lab.trace.replay.timing import Hardware


class Disk:
    """Models one device of one server: at most one load and one store at work, loads in order of
    request. While both are, loads get ``load_share`` of the device and the store the rest; alone,
    either gets all of it."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._load_end_s = 0.0
        self.store_end_s = 0.0  # of the last store, as far as is known by now

    def load(self, now_s: float, num_bytes: int) -> tuple[float, float]:
        """Return when a load asked for now begins and ends. A store under way ends later for it."""
        hardware = self._hardware
        share = hardware.load_share
        begin_s = max(now_s, self._load_end_s)
        work_s = hardware.nvme_fixed_s + num_bytes / hardware.nvme_read_bytes_per_s
        store_s = max(0.0, self.store_end_s - begin_s)  # what is left of it then
        if store_s * share <= work_s * (1 - share):  # the store is done first
            if store_s:
                self.store_end_s = begin_s + store_s / (1 - share)
            self._load_end_s = begin_s + work_s + store_s
        else:
            self.store_end_s += work_s
            self._load_end_s = begin_s + work_s / share
        return begin_s, self._load_end_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a load asked for now would begin."""
        return max(0.0, self._load_end_s - now_s)

    def store(self, now_s: float, num_bytes: int) -> None:
        """Begin a store, after the last one has ended. Loads asked for before keep their times."""
        hardware = self._hardware
        work_s = num_bytes / hardware.nvme_write_bytes_per_s
        beside_s = max(0.0, self._load_end_s - now_s) * hardware.load_share
        share = 1 - hardware.load_share
        if beside_s * share >= work_s * hardware.load_share:  # it is done before the loads are
            self.store_end_s = now_s + work_s / share
        else:
            self.store_end_s = now_s + work_s + beside_s
