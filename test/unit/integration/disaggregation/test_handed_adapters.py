"""Adapters that were loaded at run time are told apart by their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang.srt.lora.lora_registry import LoRARef

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
    first.note_loaded("1", files(tmp_path / "a", b"adapter"), "x")
    second.note_loaded("2", files(tmp_path / "b", b"adapter"), "x")
    assert known(first, "1") == known(second, "2") != b""


def test_retrained_adapter_of_the_same_name_differs(servers: Servers, tmp_path: Path) -> None:
    first, second = servers
    first.note_loaded("1", files(tmp_path / "a", b"adapter"), "x")
    second.note_loaded("2", files(tmp_path / "b", b"retrain"), "x")
    assert known(first, "1") != known(second, "2")


def test_adapter_from_tensors_has_no_equal(servers: Servers) -> None:
    for server in servers:
        server.note_loaded("1", None, "x")
    assert servers[0].digest_of("1") != servers[1].digest_of("1")


def test_adapter_of_the_start_differs_from_none(tmp_path: Path) -> None:
    """A request without one on prefill met a request of one on decode."""
    path = files(tmp_path / "a", b"adapter")
    ref = LoRARef(lora_id="1", lora_name="x", lora_path=path)
    server = HandedAdapters(tmp_path / "kv" / "made here", [ref])
    assert server.digest_of(None) == b""
    before = known(server, "1")
    assert before != b"" and server.name_of("1") == "x"
    server.note_unloaded("1")  # to make room, by --max-loaded-loras
    assert server.digest_of("1") not in (b"", before)
    server.note_loaded("2", path, "x")
    assert known(server, "2") == before


def test_id_that_is_not_known_has_no_equal(servers: Servers) -> None:
    assert len({b"", *(server.digest_of("other") for server in servers)}) == 3
