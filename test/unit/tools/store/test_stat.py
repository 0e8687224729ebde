"""``stat`` counts what is stored, says who uses it, and leaves it as it is."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import OTHER_NAMESPACE, make_run
from kit.stores import REGION, SIZES, keep, open_engine, store
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.directory import STORE_VERSION
from sglang_tiered.storage.region.files import ERASED_NAME
from sglang_tiered.storage.region.pins import PinRefusal, file_of

PAYLOAD = 12_288 + 12_000 + 9_000


def stat(cli: Cli, path: Path) -> tuple[int, dict[str, Any]]:
    outcome = cli("stat", path, "--json")
    return outcome.code, json.loads(outcome.out)


def test_the_figures_are_those_of_the_store(cli: Cli, tier: Path, shard: Path) -> None:
    keep(open_engine(shard, namespace=OTHER_NAMESPACE), make_run(7, [5000, 5000]))
    code, report = stat(cli, tier)
    total = report["total"]
    assert (code, report["ok"], report["format_version"]) == (0, True, STORE_VERSION)
    assert total["regions"] == {"all": 4, "sealed": 4, "open": 0, "damaged": 0, "other_format": 0}
    assert (total["pages"], total["superseded_pages"]) == (11, 0)
    assert (total["payload_bytes"], total["physical_bytes"]) == (3 * PAYLOAD + 10_000, 4 * REGION)
    untold = {"tokens": None, "page_bytes": None}
    assert total["namespaces"] == [
        {"namespace": "11" * 32, "pages": 9, "payload_bytes": 3 * PAYLOAD} | untold,
        {"namespace": "22" * 32, "pages": 2, "payload_bytes": 10_000} | untold,
    ]
    assert report["shards"][0]["checkpoint"] == {"present": True, "valid": True, "num_regions": 4}


def test_a_running_server_is_named_and_undisturbed(cli: Cli, tier: Path, shard: Path) -> None:
    engine = open_engine(shard)
    store(engine, make_run(8, [5000]))
    code, report = stat(cli, tier)
    assert (code, report["total"]["regions"]["open"], report["total"]["pages"]) == (0, 1, 10)
    assert report["shards"][0]["lock"] == {"held": True, "pid": os.getpid()}
    assert f"in use by process {os.getpid()}" in cli("stat", tier).out
    store(engine, make_run(9, [5000]))
    engine.check_integrity()


def test_forgotten_pages_and_pins_are_known(cli: Cli, tier: Path, shard: Path) -> None:
    engine = open_engine(shard)
    gone, kept = make_run(50, SIZES), make_run(51, SIZES[:2])
    for run in (gone, kept):
        store(engine, run)
    before = stat(cli, tier)[1]["shards"][0]["purged_pages"]
    assert is_true(engine.erase(Erasure.of(gone.keys[:2])), 20.0)
    for name in ("a", "b"):
        made = engine.pin(name, kept.keys)
        assert not isinstance(made, PinRefusal)
        assert is_true(made, 20.0)
    engine.close()
    code, report = stat(cli, tier)
    assert (code, report["shards"][0]["purged_pages"]) == (0, before + 2)
    pins = {"valid": 2, "pages": 2, "damaged": 0, "newer": 0, "unread": 0}
    assert report["shards"][0]["pins"] == pins
    (shard / file_of("b")).write_bytes(b"x")
    assert "1 pins do not verify" in cli("stat", tier).out
    assert file_of("b") in os.listdir(shard), "looking changes nothing"


@pytest.mark.parametrize("command", ["stat", "verify"])
def test_an_erase_log_unread_is_one_sentence(
    cli: Cli, tier: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A disk that fails must not look like a purge of everything."""
    real = FileReader.read_file

    def read(self: FileReader, name: str) -> bytes:
        if name == ERASED_NAME:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, name)

    monkeypatch.setattr(FileReader, "read_file", read)
    assert "which says what was erased, cannot be read" in cli(command, tier).refusal
