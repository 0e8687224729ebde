"""``bench`` measures the real engine, cleans up however it ends, and refuses too little room."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sglang_tiered.tools.store import bench

if TYPE_CHECKING:
    from pathlib import Path

Cli = Callable[..., Any]


def test_it_measures_both_ways_and_leaves_nothing_behind(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("bench", tmp_path, "--bytes", "16MiB", "--json")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert [sample["page_bytes"] for sample in report["samples"]] == [256 << 10, 1 << 20]
    for sample in report["samples"]:
        assert sample["pages"] * sample["page_bytes"] == 16 << 20
        assert sample["io"] in ("direct", "buffered")
        for kind in ("store", "load"):
            assert sample[kind]["gb_per_s"] > 0
            assert sample[kind]["cpu_s_per_gb"] >= 0
    assert os.listdir(tmp_path) == []


def test_the_table_says_it_is_no_comparison(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_measure", lambda *_: SAMPLE)
    outcome = cli("bench", tmp_path)
    assert outcome.code == 0
    assert "not a comparison, that is benchmark/bench_storage.py" in outcome.out
    assert "store, durable" in outcome.out


SAMPLE = {
    "page_bytes": 1 << 20,
    "pages": 1,
    "io": "direct",
    "store": {"gb_per_s": 1.0, "cpu_s_per_gb": 0.1, "seconds": 1.0},
    "load": {"gb_per_s": 1.0, "cpu_s_per_gb": 0.1, "seconds": 1.0},
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_being_stopped_leaves_nothing_behind(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    timed = bench._timed

    def stop(*arguments: Any) -> Any:
        timed(*arguments)
        assert len(list(tmp_path.rglob("region-*"))) > 0
        signal.raise_signal(number)

    monkeypatch.setattr(bench, "_timed", stop)
    handler = signal.getsignal(number)
    outcome = cli("bench", tmp_path, "--bytes", "16MiB")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "sglang-tiered: stopped\n")
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(number) is handler


def test_a_failing_store_is_one_sentence_and_leaves_nothing_behind(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "default_region_bytes", lambda _: 512 << 10)  # no room for a page
    outcome = cli("bench", tmp_path, "--bytes", "16MiB")
    assert outcome.code == 2
    assert "a store ended with no_space" in outcome.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", ["1MiB", "0", "lots", "8EiB", "1000000TiB"])
def test_sizes_that_cannot_work_are_one_sentence(cli: Cli, tmp_path: Path, size: str) -> None:
    outcome = cli("bench", tmp_path, "--bytes", size)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["absent", "file"])
def test_what_is_no_directory_is_one_sentence(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    outcome = cli("bench", tmp_path / name, "--bytes", "16MiB")
    assert outcome.code == 2
    assert "pass a writable directory" in outcome.err


def test_a_directory_that_cannot_be_written_is_one_sentence(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    outcome = cli("bench", tmp_path, "--bytes", "16MiB")
    assert outcome.code == 2
    assert "cannot be written (Permission denied); pass a writable directory" in outcome.err


def test_runs_in_flight_share_no_memory() -> None:
    memory = bench._pages(1 << 20, 16 << 20)
    runs = bench._runs(37, memory)
    assert sum(run.num_pages for run in runs) == 37
    in_flight = bench._JOBS_IN_FLIGHT
    for start in range(len(runs)):
        window = runs[start : start + in_flight]
        segments = [id(page[0].obj) + _offset(page[0], memory) for r in window for page in r.pages]
        assert len(set(segments)) == len(segments)


def _offset(page: memoryview, memory: list[memoryview]) -> int:
    return next(i for i, other in enumerate(memory) if other is page)
