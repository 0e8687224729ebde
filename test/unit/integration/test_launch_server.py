"""The launcher refuses a directory it must not use with one sentence and code 2, untouched."""

from __future__ import annotations

import errno
import hashlib
import pathlib
import socket
from typing import TYPE_CHECKING

import pytest

from sglang_tiered import launch_server
from sglang_tiered.config import MiB, NvmeConfig, TieredConfig, TierMode
from sglang_tiered.integration.shards import has_geometry, shard_name
from sglang_tiered.storage.region import directory, format
from sglang_tiered.storage.region.lock import DirectoryLock

if TYPE_CHECKING:
    from pathlib import Path


ANY = ("--model-path", "no/model", "--port", "0")
"""A port that nobody listens on, whoever serves on the default one."""


def fingerprint(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def refuse(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Start on ``path``; returns the one line printed. The model path does not even exist."""
    code = launch_server.main([*ANY, "--tier-dir", str(path)])
    error = capsys.readouterr().err
    assert code == 2
    (line,) = [line for line in error.splitlines() if line.startswith("sglang-tiered:")]
    return line


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tier-colour", "blue"], "unrecognized arguments: --tier-colour blue; --help lists"),
        (["--tier-mode"], "--tier-mode: expected one argument; --help lists"),
        (["--port", "70000"], "--port 70000 is not a port"),
        (["--tp", "two"], "invalid int value: 'two'; --help lists"),
        (["--tier-nvme-bytes", "-1GiB"], "--tier-nvme-bytes -1GiB must be greater than zero"),
    ],
)
def test_unusable_command_line_is_one_sentence_without_usage(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch_server.main([*ANY, *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_home_that_cannot_be_written_is_refused_before_sglang_compiles_into_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("SGLANG_CACHE_DIR", "restored with the rest")  # what main sets too
    monkeypatch.delenv("SGLANG_CACHE_DIR")
    assert launch_server.main([*ANY]) == 2
    line = capsys.readouterr().err
    assert "cannot be written (Not a directory)" in line and "XDG_CACHE_HOME" in line


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("content", ["tier-mode: blue", "tier-mode: off\ntier-dir: d", ": [", None])
def test_a_configuration_file_is_read_and_judged_like_flags(
    joined: bool, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    if content is not None:
        file.write_text(content)
    words = [f"--config={file}"] if joined else ["--config", str(file)]
    assert launch_server.main([*ANY, *words]) == 2
    line = capsys.readouterr().err
    expected = {
        "tier-mode: blue": "--tier-mode blue is unknown",
        "tier-mode: off\ntier-dir: d": "--tier-dir d has no meaning with --tier-mode off",
    }.get(content or "", "--config cannot be used")
    assert expected in line and line.count("\n") == 1


def test_port_in_use_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert launch_server.main(["--model-path", "m", "--port", str(port)]) == 2
    assert f"--port {port} is in use on 127.0.0.1" in capsys.readouterr().err


def test_foreign_directory_is_refused_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    before = fingerprint(tmp_path)
    line = refuse(tmp_path, capsys)
    assert "thesis.tex" in line and "--tier-dir" in line
    assert fingerprint(tmp_path) == before


def test_file_in_place_of_the_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    assert "not a directory" in refuse(path, capsys)
    assert path.read_text() == "x"


def test_directory_below_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    line = refuse(tmp_path / "file" / "kv", capsys)
    assert str(tmp_path / "file" / "kv") in line


def test_place_without_disk_space_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = refuse(pathlib.Path("/proc/sglang-tiered-test"), capsys)
    assert "--tier-dir /proc/sglang-tiered-test has only 0B" in line


def test_unwritable_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*args: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    # As a read-only mount answers; the tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(directory, "_write_manifest", read_only)
    line = refuse(tmp_path / "kv", capsys)
    assert "not writable (Read-only file system)" in line


def test_directory_of_a_running_server_is_refused_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_server, "LOCK_TIMEOUT_S", 0.0)
    path = tmp_path / "kv"
    directory.prepare(path)
    with DirectoryLock(path):
        before = fingerprint(tmp_path)
        line = refuse(path, capsys)
        assert "in use by process" in line and "--tier-dir" in line
        assert fingerprint(tmp_path) == before


def test_store_of_a_newer_format_is_refused_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    with monkeypatch.context() as newer:
        newer.setattr(directory, "FORMAT_VERSION", format.FORMAT_VERSION + 1)
        directory.prepare(path)
    before = fingerprint(tmp_path)
    assert "newer" in refuse(path, capsys)
    assert fingerprint(tmp_path) == before


def test_unsupported_sglang_is_refused_before_it_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_server.compat, "SUPPORTED_VERSIONS", ("0.0.1",))
    assert launch_server.main([]) == 2
    assert "install sglang==0.0.1" in capsys.readouterr().err


def test_shards_of_other_parallel_sizes_give_their_space_back(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    directory.prepare(path)
    names = [
        shard_name(tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, dp_rank=0, replica=0)
        for size in (1, 2)
        for rank in range(size)
    ]
    for name in names:
        shard = directory.shard_path(path, name)
        shard.mkdir()
        with DirectoryLock(shard):
            (shard / format.region_name(0)).write_bytes(b"pages")

    held = directory.shard_path(path, names[1])
    with DirectoryLock(held):
        removed = directory.remove_shards(
            path, keep=lambda name: has_geometry(name, tp_size=1, pp_size=1)
        )
    assert removed == [names[2]]
    kept = {shard.name.removeprefix("shard-") for shard in path.glob("shard-*")}
    assert kept == {names[0], names[1]}
    assert (directory.shard_path(path, names[0]) / format.region_name(0)).read_bytes() == b"pages"


def test_shard_with_a_foreign_file_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    directory.prepare(path)
    shard = directory.shard_path(path, "old")
    shard.mkdir()
    (shard / "notes.txt").write_text("mine")
    assert directory.remove_shards(path, keep=lambda name: False) == []
    assert (shard / "notes.txt").read_text() == "mine"


def test_banner_quotes_a_request_that_parses() -> None:
    import json
    from types import SimpleNamespace

    nvme = NvmeConfig(directory="/kv", capacity_bytes=64 * MiB, region_bytes=8 * MiB)
    config = TieredConfig(mode=TierMode.NVME, host_bytes=64 * MiB, nvme=nvme)
    args = SimpleNamespace(
        host="0.0.0.0",
        port=30000,
        served_model_name='odd "name"',
        disaggregation_mode="null",
    )
    info = {
        "max_total_num_tokens": 8192,
        "sglang_tiered_host": {"num_tokens": 16448, "num_bytes": 48 * MiB},
    }
    text = launch_server.banner(args, config, info)
    assert "http://127.0.0.1:30000" in text and "64MiB in /kv" in text
    assert "8,192 tokens" in text and "16,448 tokens in 48MiB" in text
    body = text.split("-d '", 1)[1].split("'\n", 1)[0]
    assert json.loads(body)["model"] == 'odd "name"'
