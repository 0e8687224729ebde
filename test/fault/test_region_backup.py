"""A copy of a store's directory is a store, and knows of no purge that came after it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from simulation.engine import running as running_on
from simulation.ledger import TIMEOUT_S, held, keys, submit

from kit.waiting import finished
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.device import FileDevice

pytestmark = pytest.mark.timeout(120)

TENANT = b"a" * 16
BEFORE, MEANWHILE = keys(range(24)), keys(range(100, 160))


def running(directory: Path) -> AbstractContextManager[RegionEngine]:
    directory.mkdir(exist_ok=True)
    return running_on(directory, FileDevice(directory))


def store(engine: RegionEngine, wanted: Sequence[bytes]) -> None:
    for each in wanted:
        finished(submit(engine, [each], TENANT))


def test_copy_of_a_busy_store_has_durable_pages(tmp_path: Path) -> None:
    with running(tmp_path / "store") as engine:
        store(engine, BEFORE)
        assert engine.flush(TIMEOUT_S)
        storing = threading.Thread(target=store, args=(engine, MEANWHILE))
        storing.start()
        for number in range(4):
            shutil.copytree(tmp_path / "store", tmp_path / f"copy{number}")
        storing.join(TIMEOUT_S)
        assert not storing.is_alive()
    for number in range(4):
        with running(tmp_path / f"copy{number}") as engine:
            assert held(engine, BEFORE) == len(BEFORE)
            held(engine, MEANWHILE)  # some of them, and none of them wrong
