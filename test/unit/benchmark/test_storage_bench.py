"""The parts of the storage benchmark that decide what a figure says."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from sglang_tiered.storage.region import reader
from storage_bench.figures import (
    DifferentBytesError,
    quotients,
    summarize,
)
from storage_bench.host_memory import HostPages
from storage_bench.own_engine import unverified_loads
from storage_bench.workspace import UnusableDirectoryError, Workspace


def test_a_missing_sample_breaks_no_pairing() -> None:
    assert summarize([3.0, 1.0, 2.0]) == {"value": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    assert quotients([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        quotients([2.0, 9.0], [1.0])


def test_one_wrong_byte_is_seen() -> None:
    stored, loaded = HostPages(3, 4096, seed=1), HostPages(2, 4096)
    with pytest.raises(DifferentBytesError):
        loaded.check_equal(0, stored, 1, 2)
    for number in range(2):
        loaded.pages[number][0][:] = stored.pages[number + 1][0]
    loaded.check_equal(0, stored, 1, 2)
    loaded.pages[1][0][4095] ^= 1
    with pytest.raises(DifferentBytesError):
        loaded.check_equal(0, stored, 1, 2)


def test_verification_returns_even_after_a_failure() -> None:
    before = dict(vars(reader))
    with contextlib.suppress(KeyError), unverified_loads(True):
        changed = [name for name, value in vars(reader).items() if before[name] is not value]
        assert len(changed) == 1
        assert getattr(reader, changed[0])(b"", None) is True
        raise KeyError
    assert dict(vars(reader)) == before


def test_figures_from_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_bench.workspace._filesystem_here", lambda _: "tmpfs")
    with pytest.raises(UnusableDirectoryError, match="--allow-tmpfs"):
        Workspace(tmp_path)
    assert Workspace(tmp_path, allow_tmpfs=True).filesystem == "tmpfs"


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, allow_tmpfs=True)
    with pytest.raises(KeyboardInterrupt), workspace, workspace.folder("section") as folder:
        (folder / "page").write_bytes(b"x")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
