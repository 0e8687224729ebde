"""The namespace is found without holding up a start, and never guessed."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from sglang_tiered.integration.identity import file_digests
from sglang_tiered.integration.identity.model import identify_model
from sglang_tiered.integration.identity.namespace_search import NamespaceSearch

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 20.0
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "SETTLED_NS", -1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "model.safetensors").write_bytes(os.urandom(SIZE))
    return root


class Tier:
    """A tier directory, whose turn to read another process may have."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self._path = path
        self._held: int | None = None

    def hold(self) -> None:
        self._held = os.open(self._path, os.O_RDONLY)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def let_go(self) -> None:
        assert self._held is not None
        os.close(self._held)

    def search(self, model: Path, patience_s: float = TIMEOUT_S) -> NamespaceSearch:
        identity = {"model": identify_model(str(model), None, "auto")}
        return NamespaceSearch(identity, {}, self._path, patience_s=patience_s)


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    return Tier(tmp_path / "kv")


def answer(search: NamespaceSearch) -> bytes:
    deadline = time.monotonic() + TIMEOUT_S
    while search.answer is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return search.answer


def test_small_weights_are_known_at_once(tier: Tier, model: Path) -> None:
    search = tier.search(model)
    assert search.answer is not None
    assert search.namespace == search.answer == tier.search(model).answer


def test_start_does_not_wait_for_large_weights(tier: Tier, model: Path) -> None:
    tier.hold()
    search = tier.search(model, patience_s=0.0)
    assert search.answer is None
    tier.let_go()
    assert answer(search) != search.namespace  # which no process has again
    assert answer(search) == tier.search(model).answer


def test_remembered_weights_are_known_despite_a_reader(tier: Tier, model: Path) -> None:
    before = tier.search(model).answer
    tier.hold()
    assert tier.search(model, patience_s=0.0).answer == before
    tier.let_go()


def test_refetched_weights_are_read_before_pages_are_used(
    tier: Tier, model: Path, tmp_path: Path
) -> None:
    before = tier.search(model).answer
    anew = tmp_path / "anew"
    shutil.copytree(model, anew)
    tier.hold()
    search = tier.search(anew, patience_s=0.0)
    assert search.answer is None and search.namespace == before
    tier.let_go()
    assert answer(search) == before


def test_few_edited_numbers_give_another_namespace(tier: Tier, model: Path, tmp_path: Path) -> None:
    before = tier.search(model).answer
    edited = tmp_path / "edited"
    shutil.copytree(model, edited)
    with (edited / "model.safetensors").open("r+b") as stream:
        stream.seek(8192)  # between two samples
        stream.write(b"edit")
    tier.hold()
    search = tier.search(edited, patience_s=0.0)
    assert search.answer is None and search.namespace == before
    tier.let_go()
    assert answer(search) != before


def test_weights_replaced_before_the_read_are_unique(
    tier: Tier, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was loaded is gone, so nothing says what it was."""
    tier.hold()
    searches = [tier.search(model, patience_s=0.0) for _ in range(2)]
    (model / "model.safetensors").write_bytes(os.urandom(SIZE))
    tier.let_go()
    answers = {answer(search) for search in searches}
    assert len(answers) == 2 and tier.search(model).answer not in answers
    assert "changed since it was loaded" in caplog.text
    assert all(search.is_nameless for search in searches) and not tier.search(model).is_nameless


def test_closing_ends_the_wait(tier: Tier, model: Path) -> None:
    tier.hold()
    search = tier.search(model, patience_s=0.0)
    search.close()
    assert search.answer is None and not search._thread.is_alive()
    tier.let_go()
