"""``dump`` lists pages as they were stored, and extracts only what verifies."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.runs import NAMESPACE, OTHER_NAMESPACE, MakeRun, make_soft_run, soft_encoding
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.codecs import PageLayout
from sglang_tiered.storage.base import Run
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.format import region_name
from sglang_tiered.tools.store import dump

REGION = 64 * 1024
SIZES = [12_288, 12_000, 9_000]

Cli = Callable[..., Any]
Flip = Callable[[Path, int], None]
Digest = Callable[[Path], dict[str, object]]
Open = Callable[..., RegionEngine]
Store = Callable[[RegionEngine, Run], None]


def pages(cli: Cli, path: Path, *flags: str) -> list[dict[str, Any]]:
    outcome = cli("dump", path, "--json", *flags)
    assert outcome.code == 0
    return [json.loads(line) for line in outcome.out.splitlines()]


def test_every_stored_page_has_its_line(
    cli: Cli, tier: Path, shard: Path, make_run: MakeRun
) -> None:
    found = pages(cli, tier)
    assert len(found) == 9
    run = make_run(1, SIZES)
    for index, page in enumerate(found[3:6]):
        checksum = page_checksum(NAMESPACE, run.keys[index], run.pages[index])
        assert page == {
            "shard": shard.name,
            "region": 1,
            "extent": 0,
            "offset": [8192, 20_480, 32_768][index],
            "length": SIZES[index],
            "checksum": f"{checksum:016x}",
            "key": run.keys[index].hex(),
            "namespace": NAMESPACE.hex(),
        }
        at = page["offset"]
        stored = (shard / region_name(1)).read_bytes()[at : at + page["length"]]
        assert stored == b"".join(run.pages[index])


def test_the_lines_for_people_hold_the_same_fields(cli: Cli, tier: Path) -> None:
    header, *lines = cli("dump", tier).out.splitlines()
    names = header.split()
    as_text = [dict(zip(names, line.split(), strict=True)) for line in lines]
    assert as_text == [{k: str(v) for k, v in page.items()} for page in pages(cli, tier)]


def test_filters_by_key_namespace_and_region(
    cli: Cli, tier: Path, shard: Path, open_engine: Open, make_run: MakeRun, store: Store
) -> None:
    engine = open_engine(shard, namespace=OTHER_NAMESPACE)
    store(engine, make_run(1, SIZES))
    engine.close()
    key = make_run(1, SIZES).keys[2].hex()
    assert {page["key"] for page in pages(cli, tier, "--keys", key[:10].upper())} == {key}
    assert [page["region"] for page in pages(cli, tier, "--keys", key)] == [1, 3]
    assert len(pages(cli, tier, "--namespace", "22")) == 3
    assert {page["region"] for page in pages(cli, tier, "--region", "2")} == {2}
    assert pages(cli, tier, "--keys", "00000000") == []


def test_damage_is_told_and_the_rest_listed(cli: Cli, tier: Path, shard: Path, flip: Flip) -> None:
    flip(shard / region_name(1), 8)
    outcome = cli("dump", tier)
    assert outcome.code == 1
    assert len(outcome.out.splitlines()) == 1 + 6
    assert region_name(1) in outcome.err
    assert "header at 0 (4096 bytes) does not verify" in outcome.err


def test_pages_of_a_running_server_are_listed(
    cli: Cli, tier: Path, shard: Path, open_engine: Open, make_run: MakeRun, store: Store
) -> None:
    engine = open_engine(shard)
    store(engine, make_run(8, [5000]))
    assert len(pages(cli, tier)) == 10
    engine.check_integrity()


def test_extract_writes_the_bytes_of_the_page(
    cli: Cli, tier: Path, tmp_path: Path, make_run: MakeRun
) -> None:
    run = make_run(2, SIZES)
    output = tmp_path / "page.bin"
    outcome = cli("dump", tier, "--extract", run.keys[1].hex()[:12], "--output", output)
    assert (outcome.code, outcome.out) == (0, "")
    assert output.read_bytes() == b"".join(run.pages[1])
    assert output.stat().st_mode & 0o777 == 0o600


def extract_encoded(
    cli: Cli, tier: Path, engine: RegionEngine, run: Run, store: Store
) -> tuple[Any, Path]:
    store(engine, run)
    assert engine.stats().stored_bytes < run.num_bytes
    engine.close()
    output = tier.parent / "page.bin"
    return cli("dump", tier, "--extract", run.keys[0].hex(), "--output", output), output


def test_extract_decodes_an_encoded_page(
    cli: Cli, tier: Path, open_engine: Open, store: Store
) -> None:
    engine = open_engine(shard_path(tier, "a"), encoding=soft_encoding())
    run = make_soft_run(4, [12_001])
    outcome, output = extract_encoded(cli, tier, engine, run, store)
    assert outcome.code == 0
    assert output.read_bytes() == b"".join(run.pages[0])
    assert "12001 bytes of page" in outcome.err
    assert "decoded from" in outcome.err


def test_extract_says_what_it_cannot_decode(
    cli: Cli, tier: Path, open_engine: Open, store: Store
) -> None:
    """The store does not know the model's layout."""
    layout = PageLayout.kv(dtype="bfloat16", num_layers=2, page_size=64, num_heads=2, head_dim=16)
    engine = open_engine(shard_path(tier, "a"), encoding=PageEncoding("int8", layout))
    run = make_soft_run(4, [layout.page_bytes])
    outcome, output = extract_encoded(cli, tier, engine, run, store)
    assert outcome.code == 0
    assert output.stat().st_size < layout.page_bytes
    assert "as stored: encoded by int8" in outcome.err


def test_a_page_that_begins_as_encoded_is_left(
    cli: Cli, tier: Path, open_engine: Open, store: Store
) -> None:
    engine = open_engine(shard_path(tier, "a"))
    page = bytes([0xC5, 1, 1, 2]) + b"\xff" * 5000
    run = Run((b"\xab" * 32,), ((memoryview(page),),))
    store(engine, run)
    engine.close()
    output = tier.parent / "page.bin"
    assert cli("dump", tier, "--extract", "abab", "--output", output).code == 0
    assert output.read_bytes() == page


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_extract_overwrites_nothing(
    cli: Cli, tier: Path, tmp_path: Path, make_run: MakeRun, kind: str
) -> None:
    output = tmp_path / "page.bin"
    if kind != "file":
        output.symlink_to(tmp_path / "target")
    if kind != "dangling link":
        output.write_bytes(b"precious")
    key = make_run(2, SIZES).keys[1].hex()
    outcome = cli("dump", tier, "--extract", key, "--output", output)
    assert outcome.code == 2
    assert f"--output {output} exists" in outcome.err
    assert not output.exists() or output.read_bytes() == b"precious"


def test_extract_never_overwrites_a_file_appearing_meanwhile(
    cli: Cli, tier: Path, tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "page.bin"
    output.write_bytes(b"precious")
    monkeypatch.setattr(os.path, "lexists", lambda path: path != output and os.stat(path))
    key = make_run(2, SIZES).keys[1].hex()
    outcome = cli("dump", tier, "--extract", key, "--output", output)
    assert outcome.code == 2
    assert "cannot be written (File exists)" in outcome.err
    assert output.read_bytes() == b"precious"


def test_extract_gives_no_damaged_bytes(
    cli: Cli, tier: Path, shard: Path, flip: Flip, tmp_path: Path, make_run: MakeRun
) -> None:
    flip(shard / region_name(2), 20_480 + 3)
    key = make_run(2, SIZES).keys[1].hex()
    outcome = cli("dump", tier, "--extract", key, "--output", tmp_path / "page.bin")
    assert outcome.code == 1
    assert "does not match its checksum; nothing was written" in outcome.err
    assert not (tmp_path / "page.bin").exists()


def test_extract_on_a_full_disk_leaves_no_file(
    cli: Cli, tier: Path, tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_on_full_disk(fd: int, _: str) -> Any:
        os.close(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dump, "open", open_on_full_disk, raising=False)
    key = make_run(2, SIZES).keys[1].hex()
    outcome = cli("dump", tier, "--extract", key, "--output", tmp_path / "page.bin")
    assert outcome.code == 2
    assert "cannot be written (No space left on device)" in outcome.err
    assert not (tmp_path / "page.bin").exists()


def test_extract_into_a_directory_that_is_not_there(
    cli: Cli, tier: Path, tmp_path: Path, make_run: MakeRun
) -> None:
    key = make_run(2, SIZES).keys[1].hex()
    outcome = cli("dump", tier, "--extract", key, "--output", tmp_path / "none" / "page.bin")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1


def test_extract_takes_the_copy_that_is_served(
    cli: Cli,
    tier: Path,
    shard: Path,
    flip: Flip,
    tmp_path: Path,
    open_engine: Open,
    make_run: MakeRun,
    store: Store,
) -> None:
    engine = open_engine(shard)
    engine.set_namespace(OTHER_NAMESPACE)
    engine.set_namespace(NAMESPACE)
    run = make_run(0, SIZES)
    store(engine, run)
    engine.close()
    flip(shard / region_name(0), 9000)
    output = tmp_path / "page.bin"
    assert cli("dump", tier, "--extract", run.keys[0].hex(), "--output", output).code == 0
    assert output.read_bytes() == b"".join(run.pages[0])


def test_extract_asks_which_of_several_is_meant(
    cli: Cli, tier: Path, open_engine: Open, make_run: MakeRun, store: Store, tmp_path: Path
) -> None:
    run = make_run(0, SIZES)
    key = run.keys[0].hex()
    for name, namespace in (("a", NAMESPACE), ("b", NAMESPACE), ("b", OTHER_NAMESPACE)):
        engine = open_engine(shard_path(tier, name), namespace=namespace)
        store(engine, run)
        engine.close()
    output = tmp_path / "page.bin"

    def refused(*arguments: object) -> str:
        outcome = cli("dump", *arguments, "--output", output)
        assert outcome.code == 2
        assert outcome.err.count("\n") == 1
        return str(outcome.err)

    several = set("0123456789abcdef") & {page["key"][0] for page in pages(cli, tier)}
    counts = {d: {p["key"] for p in pages(cli, tier, "--keys", d)} for d in several}
    digit = next(d for d, keys in counts.items() if len(keys) > 1)
    assert "keys (" in refused(tier, "--extract", digit)
    assert "pass one of them as DIR" in refused(tier, "--extract", key)
    assert "pass --namespace" in refused(tier / "shard-b", "--extract", key)
    assert "lists what is stored" in refused(tier, "--extract", "0" * 64)
    arguments = ("--extract", key, "--namespace", "22", "--output", output)
    assert cli("dump", tier / "shard-b", *arguments).code == 0
    assert output.read_bytes() == b"".join(run.pages[0])


@pytest.mark.parametrize(
    "flags",
    [
        ("--extract", "ab"),
        ("--output", "x"),
        ("--extract", "ab", "--output", "x", "--json"),
        ("--keys", "xyz"),
        ("--keys", "0" * 65),
        ("--region", "-1"),
        ("--jobs", "0"),
    ],
)
def test_flags_that_make_no_sense_are_one_sentence(
    cli: Cli, tier: Path, flags: tuple[str, ...]
) -> None:
    outcome = cli("dump", tier, *flags)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1


def test_a_reader_that_stops_reading_is_no_error(
    tier: Path, shard: Path, open_engine: Open, make_run: MakeRun, store: Store
) -> None:
    engine = open_engine(shard, region_bytes=8 << 20)
    store(engine, make_run(5, [4096] * 1500))
    engine.close()
    command = [sys.executable, "-m", "sglang_tiered.tools.store.cli", "dump", os.fspath(tier)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline().startswith(b"shard region")
        process.stdout.close()
        err = process.stderr.read()
    assert (process.wait(30), err) == (0, b"")


def test_nothing_is_changed(cli: Cli, tier: Path, digest: Digest, make_run: MakeRun) -> None:
    before = digest(tier)
    assert cli("dump", tier).code == 0
    key = make_run(0, SIZES).keys[0].hex()
    assert cli("dump", tier, "--extract", key, "--output", tier.parent / "page.bin").code == 0
    assert digest(tier) == before
