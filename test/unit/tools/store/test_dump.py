"""``dump`` lists pages as they were stored, and extracts only what verifies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import NAMESPACE, OTHER_NAMESPACE, make_run
from kit.stores import SIZES, flip, keep, keep_again, open_engine
from sglang_tiered.checksummed import page_checksum
from sglang_tiered.storage.region.format import region_name


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


Extract = Callable[..., Any]
PAGE = make_run(2, SIZES)
KEY, DATA = PAGE.keys[1].hex(), b"".join(PAGE.pages[1])


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "page.bin"


@pytest.fixture
def extract(cli: Cli, tier: Path, output: Path) -> Extract:
    """``extract(key)`` from the tier."""
    return lambda key: cli("dump", tier, "--extract", key, "--output", output)


def test_extract_writes_the_bytes_of_the_page(extract: Extract, shard: Path, output: Path) -> None:
    outcome = extract(KEY[:12])
    assert (outcome.code, outcome.out) == (0, "")
    assert output.read_bytes() == DATA
    assert output.stat().st_mode & 0o777 == 0o600
    output.unlink()
    run = keep_again(open_engine(shard), 0)
    flip(shard / region_name(0), 9000)
    assert extract(run.keys[0].hex()).code == 0
    assert output.read_bytes() == b"".join(run.pages[0]), "the copy that is served"


def test_extract_guesses_no_page(extract: Extract, shard: Path, output: Path) -> None:
    keep(open_engine(shard, namespace=OTHER_NAMESPACE), PAGE)
    assert f"--extract {KEY} means 2 pages" in extract(KEY).refusal
    assert not output.exists()


@pytest.mark.parametrize(
    "make",
    [lambda output: output.write_bytes(b"precious"), lambda output: output.symlink_to("nowhere")],
)
def test_extract_overwrites_nothing(
    extract: Extract, output: Path, make: Callable[[Path], object]
) -> None:
    make(output)
    is_there = output.exists()
    assert f"--output {output} cannot be written (File exists)" in extract(KEY).refusal
    assert output.exists() is is_there
    assert not is_there or output.read_bytes() == b"precious"


def test_extract_gives_no_damaged_bytes(extract: Extract, shard: Path, output: Path) -> None:
    flip(shard / region_name(2), 20_480 + 3)
    outcome = extract(KEY)
    assert outcome.code == 1
    assert "does not match its checksum; nothing was written" in outcome.err
    assert not output.exists()
