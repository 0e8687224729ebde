"""Small region stores as the tools' tests take them, and what they do to a store's files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kit.runs import NAMESPACE, OTHER_NAMESPACE, make_run
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
    engine = RegionEngine(
        shard,
        namespace=namespace,
        capacity_bytes=32 * region_bytes,
        region_bytes=region_bytes,
        num_threads=2,
        encoding=encoding,
    )
    _opened.append(engine)
    return engine


def close_engines() -> None:
    while _opened:
        _opened.pop().close()


def store(engine: RegionEngine, run: Run) -> None:
    job = engine.submit_store(run)
    assert job.wait(20.0), "the store did not finish"
    assert all(job.ok), job.reasons


def keep(engine: RegionEngine, *runs: Run) -> None:
    for run in runs:
        store(engine, run)
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
