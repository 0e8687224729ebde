"""One list names every file of a store, and nothing is written beside it."""

from __future__ import annotations

from pathlib import Path

from kit.runs import make_run
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.files import (
    CHECKPOINT_NAME,
    ERASED_NAME,
    NOTE_NAMES,
    is_shard_file,
)
from sglang_tiered.storage.region.format import region_name
from sglang_tiered.storage.region.pins import PinRefusal, file_of

REGION = 64 * 1024


def test_every_file_that_a_store_writes_is_listed(tmp_path: Path) -> None:
    engine = RegionEngine(
        tmp_path, namespace=b"\x11" * 32, capacity_bytes=4 * REGION, region_bytes=REGION
    )
    assert engine.submit_store(make_run(1, [4096])).wait(10.0)
    assert is_true(engine.erase(Erasure(tenant=b"t" * 16)), 10.0)
    assert not isinstance(engine.pin("../talk", [b"k" * 32]), PinRefusal)
    for name in NOTE_NAMES:
        engine.notes.write(name, b"x")
    engine.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert {CHECKPOINT_NAME, ERASED_NAME, region_name(0), file_of("../talk"), *NOTE_NAMES} <= names
    assert [name for name in names if not is_shard_file(name)] == []
