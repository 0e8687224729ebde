"""What a rank says its KV is of, through changes of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.runtime_context import get_context

from kit.waiting import eventually
from sglang_tiered.integration.disaggregation.handed_model import (
    REPLACED,
    STALE,
    UNKNOWN,
    HandedModel,
    WeightUpdate,
)
from sglang_tiered.integration.identity.model import identify_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Server:
    """One rank: what its endpoint was told."""

    def __init__(self, folder: Path, model: Path, *, name: str | None = None) -> None:
        self.told: list[tuple[bytes | None, str]] = []
        self.version = "default"
        self._model, self._name = model, name
        self.handed = HandedModel(
            self._identify,
            folder,
            is_declared=name is not None,
            tell=lambda model, note: self.told.append((model, note)),
        )

    def _identify(self) -> dict[str, Any]:
        if self._name is not None:
            return {"declared": self._name, "weight_version": self.version}
        return {"model": identify_model(str(self._model), None, "auto")}

    def says(self) -> tuple[bytes, str]:
        def is_known() -> bool:
            self.handed.settle()
            return self.told[-1][0] is not None

        eventually(is_known)
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
    server.handed.tell_to(lambda *said: server.told.append(said))
    assert server.says() == told[-1]
    server.update(weights(tmp_path / "c", b"others"), is_clean=False)
    assert server.says()[1] == STALE
    server.handed.tell_to(lambda *said: told.append(said))
    assert told[-1][1] == STALE, "until memory was flushed"
    server.handed.memory_was_flushed()
    assert told[-1][1] == REPLACED


def test_one_sided_update_is_another_model(pair: tuple[Server, Server], tmp_path: Path) -> None:
    first, second = pair
    before = second.model
    new = weights(tmp_path / "new", b"updated")
    assert first.model == before
    first.update(new)
    assert first.model != before and first.says()[1] == REPLACED
    second.update(new)
    assert second.model == first.model


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
    first.update(new, is_complete=False)
    second.update(new)
    assert first.model != second.model
    first.update(new)
    assert first.model == second.model
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


def test_unknown_weights_say_so(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert Server(tmp_path / "kv", empty).says()[1] == UNKNOWN


def test_declared_model_follows_the_weight_version(tmp_path: Path) -> None:
    one, two = (Server(tmp_path / name, tmp_path, name="demo") for name in "ab")
    assert one.model == two.model
    for server in (one, two):
        server.update(None)  # without a version, or in an open session
    assert one.model != two.model
    for server in (one, two):
        server.version = "v2"
        server.update(None, is_complete=False)
    assert one.model != two.model
    for server in (one, two):
        server.update(None)
    assert one.model == two.model
