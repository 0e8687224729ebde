"""``PinnedObjects``: the pins of a bucket as its collector sees them: what they keep, and which of
them are over."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_tiered.storage.object.forgotten import Forgotten
    from sglang_tiered.storage.object.format import Manifest
    from sglang_tiered.storage.object.listings import Entry
    from sglang_tiered.storage.object.names import ObjectId
    from sglang_tiered.storage.region.pinning.pins import Pin

__all__ = ["PinnedObjects"]


class PinnedObjects:
    """``bound_bytes`` is what pins may keep: what is older than the rest goes on being kept. The
    last pin of a name is in force; pages that were forgotten since it was made are not in it."""

    def __init__(self, bound_bytes: int) -> None:
        self._left_bytes = bound_bytes
        self._pins: dict[ObjectId, tuple[Pin, Entry]] = {}
        self._over: set[ObjectId] = set()
        self._removed: set[ObjectId] = set()
        self.named: set[bytes] = set()  # by all pins, in force or not
        self.keys: set[bytes] = set()
        self.forgotten_keys: set[bytes] = set()  # that pins in force name all the same

    def __contains__(self, pin_id: ObjectId) -> bool:
        return pin_id in self._pins

    def add(self, pin: Pin, pin_id: ObjectId, entry: Entry) -> None:
        self._pins[pin_id] = (pin, entry)
        self.named.update(pin.keys)

    def take_up(self, counts: Callable[[Pin, ObjectId], bool], forgotten: Forgotten) -> None:
        """Find what all pins keep; ``counts``: one is over neither by its time nor by a purge."""
        last: dict[str, ObjectId] = {}
        for pin_id, (pin, _) in self._pins.items():
            last[pin.name] = max(last.get(pin.name, pin_id), pin_id)
        for pin_id, (pin, _) in self._pins.items():
            alive = {key for key in pin.keys if forgotten.of(key) < pin_id.unix_ms}
            if last[pin.name] != pin_id or not alive or not counts(pin, pin_id):
                self._over.add(pin_id)
            else:
                self.keys |= alive
                self.forgotten_keys |= set(pin.keys) - alive

    def over(self) -> list[tuple[ObjectId, Entry]]:
        """Return the pins that keep nothing any more, each once."""
        new = sorted(self._over - self._removed)
        self._removed |= self._over
        return [(pin_id, self._pins[pin_id][1]) for pin_id in new]

    def keeps(self, manifest: Manifest) -> bool:
        """Return whether an object stays, as it holds a page of a pin."""
        if not any(bytes(key) in self.keys for key in manifest.pages["key"]):
            return False
        self._left_bytes -= manifest.object_bytes
        return self._left_bytes >= 0
