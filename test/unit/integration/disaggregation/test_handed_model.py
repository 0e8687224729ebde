"""What a rank says its KV is of, through changes of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.runtime_context import get_context

from kit.waiting import eventually
from sglang_tiered.integration.disaggregation.handoffs import (
    REPLACED,
    STALE,
    HandedAdapters,
    HandedModel,
    WeightUpdate,
)
from sglang_tiered.integration.identity.model import identify_model


class Server:
    """One rank: what its endpoint was told."""

    def __init__(self, folder: Path, model: Path, *, name: str | None = None) -> None:
        self.told: list[tuple[bytes | None, str]] = []
        self.version = "default"
        self._model, self._name = model, name
        tell: Any = lambda *said: self.told.append(said)  # noqa: E731
        self.handed = HandedModel(self._identify, folder, is_declared=name is not None, tell=tell)

    def _identify(self) -> dict[str, Any]:
        if self._name is not None:
            return {"declared": self._name, "weight_version": self.version}
        return {"model": identify_model(str(self._model), None, "auto")}

    def says(self) -> tuple[bytes, str]:
        eventually(lambda: (self.handed.settle(), self.told[-1][0])[1] is not None)
        model, note = self.told[-1]
        assert model is not None
        return model, note

    @property
    def model(self) -> bytes:
        return self.says()[0]

    def update(self, path: Path | None, *, is_complete: bool = True, is_clean: bool = True) -> None:
        update = WeightUpdate(path and str(path), is_complete=is_complete)
        self.handed.weights_changed(update, memory_is_clean=is_clean)


@pytest.fixture(autouse=True)
def published(tmp_path: Path) -> Iterator[None]:
    with get_context().override_server_args(model_path=str(tmp_path)):
        yield


def weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Server, Server]:
    """Two servers of the same weights, in folders of their own."""
    one, two = (
        Server(tmp_path / f"kv-{name}", weights(tmp_path / name, b"weights")) for name in "ab"
    )
    return one, two


def test_equal_files_elsewhere_are_the_same_model(pair: tuple[Server, Server]) -> None:
    assert pair[0].says() == pair[1].says()
    assert pair[0].says()[1] == "", "nothing is wrong with them"
    assert pair[0].told[0] == (None, ""), "nothing is handed over before it is known"


def test_switched_role_goes_on_with_what_is_known(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    server, told = pair[0], []
    so_far = server.told[-1]  # not known yet, unless the files were read at once
    server.handed.tell_to(lambda *said: told.append(said))
    assert told == [so_far]
    eventually(lambda: (server.handed.settle(), told[-1][0])[1] is not None)
    server.update(weights(tmp_path / "c", b"others"), is_clean=False)
    eventually(lambda: (server.handed.settle(), told[-1][0])[1] is not None)
    server.handed.tell_to(lambda *said: server.told.append(said))
    assert server.says()[1] == told[-1][1] == STALE, "until memory was flushed"
    server.handed.memory_was_flushed()
    assert server.says()[1] == REPLACED


def test_update_that_names_no_files_has_no_equal(pair: tuple[Server, Server]) -> None:
    models = {server.model for server in pair}
    for server in pair:
        server.update(None)
        models.add(server.model)
    assert len(models) == 3


def test_failed_update_is_level_again_once_repeated(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    first, second = pair
    new, other = weights(tmp_path / "new", b"n"), weights(tmp_path / "other", b"o")
    assert first.model == second.model
    before = first.model
    first.update(new, is_complete=False)
    second.update(new)
    assert first.model != second.model != before
    first.update(new)
    assert first.says() == second.says() and first.says()[1] == REPLACED
    first.update(other, is_complete=False)  # some weights of these may stay
    first.update(new)
    second.update(new)
    assert first.model != second.model


def test_prefill_with_old_kv_hands_nothing_over(
    pair: tuple[Server, Server], tmp_path: Path
) -> None:
    first, second = pair
    new = weights(tmp_path / "new", b"updated")
    assert first.model == second.model
    first.update(new, is_clean=False)
    second.update(new)
    model, note = first.says()
    assert model != second.model and note == STALE
    first.handed.memory_was_flushed()
    assert first.says() == second.says()


def test_declared_model_follows_the_weight_version(tmp_path: Path) -> None:
    one, two = (Server(tmp_path / name, tmp_path, name="demo") for name in "ab")
    assert one.model == two.model
    for version, is_complete in (("default", True), ("v2", False), ("v2", True)):
        for server in (one, two):
            server.version = version
            server.update(None, is_complete=is_complete)
        # Without a new version, or in an open session, nobody else has these weights.
        assert (one.model == two.model) is (version == "v2" and is_complete)


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


@pytest.mark.parametrize("content", [b"adapter", b"retrain"])
def test_adapters_of_one_name_go_by_files(servers: Servers, tmp_path: Path, content: bytes) -> None:
    first, second = servers
    first.note_loaded("1", files(tmp_path / "a", b"adapter"), "x")
    second.note_loaded("2", files(tmp_path / "b", content), "x")
    assert known(first, "1") != b""
    assert (known(first, "1") == known(second, "2")) == (content == b"adapter")


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
