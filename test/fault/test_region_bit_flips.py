"""Bits flip, blocks go astray, files change their size: over every structure of a small store.

The corpus holds sealed regions and an open one, as a killed process leaves them.
After each damage the store opens, returns no wrong byte, and serves every page whose file was not
touched.
``test_region_damage.py`` names what a damage costs inside its own region; this finds the places
nobody thought of.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from simulation.device import SimulatedDevice
from simulation.engine import REGION, running
from simulation.ledger import Ledger, content, keys
from simulation.lives import Files, found

from kit.thirds import in_thirds, is_of
from sglang_tiered.storage.region.format import BLOCK_BYTES, parse_region_name, region_name

Damage = dict[str, bytes | None]  # what a file holds instead; None: it is gone

NUM_BLOCKS = REGION // BLOCK_BYTES


@dataclass(frozen=True)
class Corpus:
    ledger: Ledger
    earlier: Files  # the same store, some stores before
    files: Files
    homes: dict[bytes, str]  # key -> the file its page is in
    regions: list[str]

    def elsewhere(self, *names: str) -> set[bytes]:
        return {key for key, home in self.homes.items() if home not in names}


def build(directory: Path) -> Corpus:
    device, ledger = SimulatedDevice(), Ledger()
    with running(directory, device) as engine:
        for start in range(0, 12, 3):
            ledger.store(engine, keys(range(start, start + 3)))
    earlier: Files = {}
    with running(directory, device) as engine:
        for start in range(12, 30, 3):
            ledger.store(engine, keys(range(start, start + 3)))
            assert ledger.sync(engine)
            if start == 18:
                earlier = device.crash("kill")
        ledger.store(engine, keys(range(30, 33)))
        files = device.crash("kill")
    homes = {
        key: name
        for key in ledger.acknowledged
        for name, data in files.items()
        if content(ledger.namespace, key) in data
    }
    assert homes.keys() == ledger.acknowledged
    regions = sorted(name for name in files if parse_region_name(name) is not None)
    is_sealed = [any(block_of(files[name], NUM_BLOCKS - 1)) for name in regions]
    assert is_sealed == [True] * (len(regions) - 1) + [False] and len(regions) >= 5
    return Corpus(ledger, earlier, files, homes, regions)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Another store with the same numbers everywhere: only nonces tell the two apart."""
    return build(tmp_path_factory.mktemp("stranger"))


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def block_of(data: bytes, block: int) -> bytes:
    return data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]


def flips(corpus: Corpus, stranger: Corpus, source: random.Random) -> Iterator[Damage]:
    """Where fields are, where the checksum is, and anywhere; then many bits at once."""
    for name, block in itertools.product(corpus.regions, range(NUM_BLOCKS)):
        start, size = block * BLOCK_BYTES * 8, BLOCK_BYTES * 8
        for first, stop in ((0, 128 * 8), (size - 64, size), (0, size)):
            yield {name: flipped(corpus.files[name], start + source.randrange(first, stop))}
    for _ in range(30):
        files = dict(corpus.files)
        for _ in range(source.randint(2, 40)):
            name = source.choice(sorted(files))
            files[name] = flipped(files[name], source.randrange(len(files[name]) * 8))
        yield files


def blocks(corpus: Corpus, stranger: Corpus, source: random.Random) -> Iterator[Damage]:
    """That hold something else, valid in itself but of another place, file, time or store: of that
    only nonces tell."""
    for number, name in enumerate(corpus.regions):
        data = corpus.files[name]
        for block in range(number % 2, NUM_BLOCKS, 2):
            other = source.choice(corpus.regions)
            for new in (
                bytes(BLOCK_BYTES),
                source.randbytes(BLOCK_BYTES),
                block_of(corpus.files[other], source.randrange(NUM_BLOCKS)),
                block_of(corpus.earlier.get(name, bytes(REGION)), block),
                block_of(stranger.files[name], block),
            ):
                if new != block_of(data, block):
                    end = (block + 1) * BLOCK_BYTES
                    yield {name: data[: block * BLOCK_BYTES] + new + data[end:]}


def sizes(corpus: Corpus, stranger: Corpus, source: random.Random) -> Iterator[Damage]:
    """Cut anywhere, or grown."""
    for number, name in enumerate(corpus.regions):
        data = corpus.files[name]
        for block in range(NUM_BLOCKS):
            odd = (number + block) % 2 * source.randrange(1, BLOCK_BYTES)
            yield {name: data[: block * BLOCK_BYTES + odd]}
        for tail in (bytes(1), bytes(REGION), source.randbytes(5000), data, data[BLOCK_BYTES:]):
            yield {name: data + tail}


def whole_files(corpus: Corpus, stranger: Corpus, source: random.Random) -> Iterator[Damage]:
    """Restored from an earlier time, under another number, or gone."""
    for name in corpus.regions:
        yield {name: corpus.earlier.get(name)}
        yield {name: None}
        for copy in map(region_name, (0, 3, 77)):
            if copy != name:
                yield {copy: corpus.files[name]}


@in_thirds
@pytest.mark.parametrize("damages", [flips, blocks, sizes, whole_files])
def test_damage_costs_no_other_regions_page(
    tmp_path: Path, corpus: Corpus, stranger: Corpus, damages: Any, third: int
) -> None:
    for number, damage in enumerate(damages(corpus, stranger, random.Random(1))):
        if not is_of(third, number):
            continue
        files = {name: data for name, data in (corpus.files | damage).items() if data is not None}
        touched = {name for name in files | damage if files.get(name) != corpus.files.get(name)}
        owed, device = corpus.elsewhere(*touched), SimulatedDevice(files)
        first = found(tmp_path, device, corpus.ledger, owed)
        if number % 4 == 0:
            again = found(tmp_path, device, corpus.ledger, owed)
            assert again == first, "the second opening found others"
