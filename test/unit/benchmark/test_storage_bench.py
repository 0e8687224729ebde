"""The parts of the storage benchmark that decide what a figure says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from sglang_tiered.storage.region import reader
from storage_bench import idle_section
from storage_bench.figures import (
    DifferentBytesError,
    Report,
    percentile,
    quotients,
    size_name,
    summarize,
)
from storage_bench.host_memory import HostPages
from storage_bench.keys import make_keys
from storage_bench.own_engine import make_runs, unverified_loads
from storage_bench.setting import in_turn
from storage_bench.trace_section import PageLru, chain_keys
from storage_bench.workspace import UnusableDirectoryError, Workspace, filesystem_of


def test_a_missing_sample_breaks_no_pairing() -> None:
    assert summarize([3.0, 1.0, 2.0]) == {"value": 2.0, "min": 1.0, "max": 3.0, "n": 3}
    assert quotients([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        quotients([2.0, 9.0], [1.0])


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_sample_that_occurred(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_a_figure_without_row_is_in_the_results() -> None:
    report = Report()
    report.add("shown", [1.0])
    report.add("hidden", [2.0], in_table=False)
    assert set(report.ratios) == {"shown", "hidden"}
    assert report.table().row_count == 1
    names = [size_name(size) for size in (32 << 10, 256 << 10, 1 << 20, 8 << 20)]
    assert names == ["32KiB", "256KiB", "1MiB", "8MiB"], "as in the targets"
    orders = ["".join(in_turn(["a", "b", "c"], turn)) for turn in range(2)]
    assert orders == ["abc", "cba"], "no side is always first"


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


def test_no_two_runs_in_flight_share_a_buffer() -> None:
    memory = HostPages(5, 4096)
    for number in range(5):
        memory.pages[number][0][0] = number
    runs = make_runs([make_keys(str(number), 2) for number in range(3)], memory)
    assert [[page[0][0] for page in run.pages] for run in runs] == [[0, 1], [2, 3], [0, 1]]
    assert memory.tensors[2].data_ptr() % 4096 == 0


def test_verification_returns_even_after_a_failure() -> None:
    before = dict(vars(reader))
    with contextlib.suppress(KeyError), unverified_loads(True):
        changed = [name for name, value in vars(reader).items() if before[name] is not value]
        assert len(changed) == 1
        assert getattr(reader, changed[0])(b"", None) is True
        raise KeyError
    assert dict(vars(reader)) == before


def test_a_renamed_verification_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in vars(reader) if "verif" in name]:
        monkeypatch.delattr(reader, name)
    with pytest.raises(RuntimeError, match="adapt"), unverified_loads(True):
        pass


def test_the_simulated_lru_counts_leading_hits_only() -> None:
    lru = PageLru(3)
    a, b, c, d = make_keys("lru", 4)
    assert lru.access([a, b, c]) == 0
    assert lru.access([a, b, d]) == 2  # c goes: it was used least recently
    assert lru.access([a, c, b]) == 1  # b is held, but behind a miss
    assert lru.access([a, c, b]) == 3


def test_a_pages_key_depends_on_its_prefix() -> None:
    first, second = chain_keys([1, 2, 3]), chain_keys([1, 9, 3])
    assert [len(key) for key in first] == [32, 32, 32]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False]


def test_the_filesystem_is_found_by_its_device(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    lines = f"20 1 0:99 / /other rw shared:1 - tmpfs none rw\n30 1 {place} / / rw - xfs /dev/x rw\n"
    assert filesystem_of(tmp_path, lines) == "xfs"
    assert filesystem_of(tmp_path, "20 1 0:99 / /other rw - tmpfs none rw\n") == "unknown"


def test_figures_from_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage_bench.workspace._filesystem_here", lambda _: "tmpfs")
    with pytest.raises(UnusableDirectoryError, match="--allow-tmpfs"):
        Workspace(tmp_path)
    assert Workspace(tmp_path, allow_tmpfs=True).filesystem == "tmpfs"


def test_a_disk_too_small_is_refused_unwritten(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, allow_tmpfs=True)
    workspace.check_space(1, 1)
    with pytest.raises(UnusableDirectoryError, match="GB free"):
        workspace.check_space(1 << 60, 1)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, allow_tmpfs=True)
    with pytest.raises(KeyboardInterrupt), workspace, workspace.folder("section") as folder:
        (folder / "page").write_bytes(b"x")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_idle_conversations_are_found_after_every_restart(tmp_path: Path) -> None:
    found = idle_section.measure(tmp_path, num_conversations=80, num_samples=1)
    assert found.num_regions == 2  # 1,280 pages of 4 KiB
    for name in idle_section.RESTARTS:
        (one,) = found.opened[name]
        assert one["open_s"] > 0
        assert len(one["lookup_s"]) == 800


def test_lost_conversations_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damage_all(region: Path) -> None:
        region.write_bytes(bytes(region.stat().st_size))

    monkeypatch.setattr(idle_section, "_damage_trailer", damage_all)
    with pytest.raises(RuntimeError, match="ended early|are found"):
        idle_section.measure(tmp_path, num_conversations=8, num_samples=1)
