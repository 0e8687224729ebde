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
from kit.stores import REGION, keep, open_engine
from sglang_tiered.storage.region.device import FileReader
from sglang_tiered.storage.region.directory import STORE_VERSION
from sglang_tiered.storage.region.files import ERASED_NAME

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
