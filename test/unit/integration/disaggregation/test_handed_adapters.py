"""Adapters that were loaded at run time are told apart by their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.waiting import eventually
from sglang_tiered.integration.disaggregation.handed_model import HandedAdapters

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def servers(tmp_path: Path) -> tuple[HandedAdapters, HandedAdapters]:
    folders = tmp_path / "kv-a", tmp_path / "kv-b"
    for folder in folders:
        folder.mkdir()
    return HandedAdapters(folders[0]), HandedAdapters(folders[1])


def files(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


def known(server: HandedAdapters, lora_id: str) -> bytes:
    eventually(lambda: server.digest_of(lora_id) == server.digest_of(lora_id))
    return server.digest_of(lora_id)


Servers = tuple[HandedAdapters, HandedAdapters]


def test_equal_files_are_one_adapter(servers: Servers, tmp_path: Path) -> None:
    first, second = servers
    first.note_loaded("1", files(tmp_path / "a", b"adapter"))
    second.note_loaded("2", files(tmp_path / "b", b"adapter"))
    assert known(first, "1") == known(second, "2") != b""


def test_retrained_adapter_of_the_same_name_differs(servers: Servers, tmp_path: Path) -> None:
    first, second = servers
    first.note_loaded("1", files(tmp_path / "a", b"adapter"))
    second.note_loaded("2", files(tmp_path / "b", b"retrain"))
    assert known(first, "1") != known(second, "2")


def test_adapter_from_tensors_has_no_equal(servers: Servers) -> None:
    for server in servers:
        server.note_loaded("1", None)
    assert servers[0].digest_of("1") != servers[1].digest_of("1")


def test_adapters_of_the_start_belong_to_the_model(servers: Servers, tmp_path: Path) -> None:
    first, _ = servers
    assert first.digest_of(None) == first.digest_of("of --lora-paths") == b""
    first.note_loaded("1", files(tmp_path / "a", b"adapter"))
    first.note_unloaded("1")
    assert first.digest_of("1") == b""
