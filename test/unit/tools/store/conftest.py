"""Small real stores, the command line run in this process, and a digest of a whole directory."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kit.runs import NAMESPACE, MakeRun
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.directory import prepare, shard_path
from sglang_tiered.tools.store.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_tiered.storage.base import Run
    from sglang_tiered.storage.encoding import PageEncoding

REGION = 64 * 1024
SHARD = "tp0of1-pp0of1-dp0-0"
TIMEOUT_S = 20.0


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]
Open = Callable[..., RegionEngine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """``open_engine(shard, namespace=...)`` on a shard directory; closed at the end."""
    engines = []

    def open_(
        shard: Path,
        namespace: bytes = NAMESPACE,
        region_bytes: int = REGION,
        encoding: PageEncoding | None = None,
    ) -> RegionEngine:
        engine = RegionEngine(
            shard,
            namespace=namespace,
            capacity_bytes=32 * region_bytes,
            region_bytes=region_bytes,
            num_threads=2,
            encoding=encoding,
        )
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        engine.close()


@pytest.fixture
def store() -> Callable[[RegionEngine, Run], None]:
    def store_(engine: RegionEngine, run: Run) -> None:
        job = engine.submit_store(run)
        assert job.wait(TIMEOUT_S), "the store did not finish"
        assert all(job.ok), job.reasons

    return store_


@pytest.fixture
def tier(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    open_engine: Open,
    make_run: MakeRun,
    store: Callable[..., None],
) -> Path:
    """A closed tier with one shard: three sealed regions of one extent of three pages each."""
    template = tmp_path_factory.getbasetemp() / "tier"
    if not template.exists():
        prepare(template)
        engine = open_engine(shard_path(template, SHARD))
        for seed in range(3):
            store(engine, make_run(seed, [12_288, 12_000, 9_000]))
        engine.close()
    return shutil.copytree(template, tmp_path / "tier")


@pytest.fixture
def shard(tier: Path) -> Path:
    return shard_path(tier, SHARD)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    """``cli("stat", path, "--json")`` runs the command in this process."""

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Outcome(code, out, err)

    return run


@pytest.fixture
def digest() -> Callable[[Path], dict[str, object]]:
    """Names, bytes, times and modes of everything below a directory."""

    def digest_(directory: Path) -> dict[str, object]:
        found: dict[str, object] = {}
        for path in [directory, *sorted(directory.rglob("*"))]:
            status = path.lstat()
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            found[os.fspath(path.relative_to(directory.parent))] = (
                status.st_mode,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
                hashlib.sha256(data).hexdigest(),
            )
        return found

    return digest_


@pytest.fixture
def flip() -> Callable[[Path, int], None]:
    """Flip one bit of a file, at an offset in bytes."""

    def flip_(file: Path, offset: int) -> None:
        with file.open("r+b") as stream:
            stream.seek(offset)
            byte = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([byte ^ 0x10]))

    return flip_
