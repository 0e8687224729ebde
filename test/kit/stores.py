"""Small region stores as the tools' tests take them, and what they do to a store's files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kit.runs import NAMESPACE, OTHER_NAMESPACE, make_run
from kit.tiers import open_region, store
from sglang_tiered.storage.base import Run
from sglang_tiered.storage.encoding import PageEncoding
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region import format as region_format
from sglang_tiered.storage.region.format import RegionHeader, pack_region_header, region_name

REGION = 64 * 1024
SIZES = [12_288, 12_000, 9_000]

_opened: list[RegionEngine] = []


def open_engine(
    shard: Path,
    namespace: bytes = NAMESPACE,
    region_bytes: int = REGION,
    encoding: PageEncoding | None = None,
) -> RegionEngine:
    """On a shard directory; closed by ``close_engines``, if not before."""
    sizes = {"capacity_bytes": 32 * region_bytes, "region_bytes": region_bytes}
    _opened.append(open_region(shard, namespace=namespace, encoding=encoding, **sizes))
    return _opened[-1]


def close_engines() -> None:
    while _opened:
        _opened.pop().close()


def keep(engine: RegionEngine, *runs: Run) -> None:
    store(engine, *runs)
    engine.close()


def keep_again(engine: RegionEngine, seed: int, num_pages: int = 3) -> Run:
    """Store pages that the store holds already a second time, and close the engine."""
    engine.set_namespace(OTHER_NAMESPACE)
    engine.set_namespace(NAMESPACE)
    run = make_run(seed, SIZES[:num_pages])
    keep(engine, run)
    return run


def flip(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))


def damage(shard: Path, data: bytes, place: int = 0) -> None:
    """Flip a bit of a page that is stored in these bytes, behind the engine's back."""
    changed = bytearray(data)
    changed[place] ^= 1
    for file in shard.glob("*.kv"):
        file.write_bytes(file.read_bytes().replace(data, changed))


def plant_region(shard: Path, version: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_format, "FORMAT_VERSION", version)
        block = pack_region_header(RegionHeader(REGION, 9, b"n" * 16, 0))
    (shard / region_name(9)).write_bytes(block.ljust(REGION, b"\0"))


def digest(directory: Path) -> dict[str, object]:
    """Names, bytes, times and modes of everything below a directory."""
    found: dict[str, object] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        about = status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        found[os.fspath(path.relative_to(directory.parent))] = (
            *about,
            hashlib.sha256(data).hexdigest(),
        )
    return found
