"""``dump`` lists pages as they were stored, and extracts only what verifies."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import NAMESPACE, OTHER_NAMESPACE, make_run, make_soft_run, soft_encoding
from kit.stores import SIZES, flip, keep, keep_again, open_engine, store
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.codecs import PageLayout
from sglang_tiered.storage.base import Run
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.format import region_name
from sglang_tiered.tools.store import dump


def pages(cli: Cli, path: Path, *flags: str) -> list[dict[str, Any]]:
    outcome = cli("dump", path, "--json", *flags)
    assert outcome.code == 0
    return [json.loads(line) for line in outcome.out.splitlines()]


def test_every_stored_page_has_its_line(cli: Cli, tier: Path, shard: Path) -> None:
    found = pages(cli, tier)
    assert len(found) == 9
    run = make_run(1, SIZES)
    for index, page in enumerate(found[3:6]):
        checksum = page_checksum(NAMESPACE, run.keys[index], run.pages[index])
        place = {"shard": shard.name, "region": 1, "extent": 0, "length": SIZES[index]}
        place |= {"offset": [8192, 20_480, 32_768][index], "namespace": NAMESPACE.hex()}
        assert page == place | {"checksum": f"{checksum:016x}", "key": run.keys[index].hex()}
        at = page["offset"]
        stored = (shard / region_name(1)).read_bytes()[at : at + page["length"]]
        assert stored == b"".join(run.pages[index])
    header, *lines = (line.split() for line in cli("dump", tier).out.splitlines())
    as_text = [dict(zip(header, line, strict=True)) for line in lines]
    assert as_text == [{k: str(v) for k, v in page.items()} for page in found], "for people"


def test_filters_by_key_namespace_and_region(cli: Cli, tier: Path, shard: Path) -> None:
    keep(open_engine(shard, namespace=OTHER_NAMESPACE), make_run(1, SIZES))
    key = make_run(1, SIZES).keys[2].hex()
    assert {page["key"] for page in pages(cli, tier, "--keys", key[:10].upper())} == {key}
    assert [page["region"] for page in pages(cli, tier, "--keys", key)] == [1, 3]
    assert len(pages(cli, tier, "--namespace", "22")) == 3
    assert {page["region"] for page in pages(cli, tier, "--region", "2")} == {2}
    assert pages(cli, tier, "--keys", "00000000") == []


def test_damage_is_told_and_the_rest_listed(cli: Cli, tier: Path, shard: Path) -> None:
    flip(shard / region_name(1), 8)
    outcome = cli("dump", tier)
    assert outcome.code == 1
    assert len(outcome.out.splitlines()) == 1 + 6
    assert region_name(1) in outcome.err
    assert "header at 0 (4096 bytes) does not verify" in outcome.err


Extract = Callable[..., Any]
PAGE = make_run(2, SIZES)
KEY, DATA = PAGE.keys[1].hex(), b"".join(PAGE.pages[1])
KV = PageLayout.kv(dtype="bfloat16", num_layers=2, page_size=64, num_heads=2, head_dim=16)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "page.bin"


@pytest.fixture
def extract(cli: Cli, tier: Path, output: Path) -> Extract:
    """``extract(key)`` from the tier."""
    return lambda key: cli("dump", tier, "--extract", key, "--output", output)


def test_extract_writes_the_bytes_of_the_page(
    extract: Extract, tier: Path, shard: Path, output: Path
) -> None:
    outcome = extract(KEY[:12])
    assert (outcome.code, outcome.out) == (0, "")
    assert output.read_bytes() == DATA
    assert output.stat().st_mode & 0o777 == 0o600
    output.unlink()
    encoded = bytes([0xC5, 1, 1, 2]) + b"\xff" * 5000  # as an encoded one begins
    keep(open_engine(shard_path(tier, "a")), Run((b"\xab" * 32,), ((memoryview(encoded),),)))
    assert extract("abab").code == 0
    assert output.read_bytes() == encoded
    output.unlink()
    run = keep_again(open_engine(shard), 0)
    flip(shard / region_name(0), 9000)
    assert extract(run.keys[0].hex()).code == 0
    assert output.read_bytes() == b"".join(run.pages[0]), "the copy that is served"


@pytest.mark.parametrize("is_known", [True, False])
def test_extract_decodes_what_it_can(
    extract: Extract, tier: Path, output: Path, is_known: bool
) -> None:
    """The store does not know the model's layout."""
    encoding = soft_encoding() if is_known else PageEncoding("int8", KV)
    engine = open_engine(shard_path(tier, "a"), encoding=encoding)
    run = make_soft_run(4, [12_001 if is_known else KV.page_bytes])
    store(engine, run)
    assert engine.stats().stored_bytes < run.num_bytes
    engine.close()
    outcome = extract(run.keys[0].hex())
    assert outcome.code == 0
    assert (output.read_bytes() == b"".join(run.pages[0])) is is_known
    if is_known:
        assert "12001 bytes of page" in outcome.err and "decoded from" in outcome.err
    else:
        assert output.stat().st_size < KV.page_bytes
        assert "as stored: encoded by int8" in outcome.err


def write_meanwhile(output: Path, patch: pytest.MonkeyPatch) -> None:
    output.write_bytes(b"precious")
    patch.setattr(os.path, "lexists", lambda path: path != output and os.stat(path))


def fill_disk(output: Path, patch: pytest.MonkeyPatch) -> None:
    def open_on_full_disk(fd: int, _: str) -> Any:
        os.close(fd)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(dump, "open", open_on_full_disk, raising=False)


def link(output: Path, _: pytest.MonkeyPatch) -> None:
    output.symlink_to(output.with_name("target"))
    output.write_bytes(b"precious")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda output, _: output.write_bytes(b"precious"), "--output {} exists"),
        (link, "--output {} exists"),
        (lambda output, _: output.symlink_to("nowhere"), "--output {} exists"),
        (write_meanwhile, "cannot be written (File exists)"),
        (fill_disk, "cannot be written (No space left on device)"),
    ],
)
def test_extract_overwrites_nothing(
    extract: Extract, output: Path, monkeypatch: pytest.MonkeyPatch, make: Any, said: str
) -> None:
    make(output, monkeypatch)
    is_there = output.exists()
    assert said.format(output) in extract(KEY).refusal
    assert output.exists() is is_there
    assert not is_there or output.read_bytes() == b"precious"


def test_extract_gives_no_damaged_bytes(extract: Extract, shard: Path, output: Path) -> None:
    flip(shard / region_name(2), 20_480 + 3)
    outcome = extract(KEY)
    assert outcome.code == 1
    assert "does not match its checksum; nothing was written" in outcome.err
    assert not output.exists()
