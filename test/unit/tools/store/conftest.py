"""Small real stores, and the command line run in this process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.commands import Cli, cli_of
from kit.runs import make_run
from kit.stores import SIZES, close_engines, keep, open_engine
from sglang_tiered.storage.region.directory import prepare, shard_path
from sglang_tiered.tools.store.cli import main

SHARD = "tp0of1-pp0of1-dp0-0"


@pytest.fixture(autouse=True)
def no_engine_stays_open() -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture
def tier(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed tier with one shard: three sealed regions of one extent of three pages each."""
    template = tmp_path_factory.getbasetemp() / "tier"
    if not template.exists():
        prepare(template)
        keep(
            open_engine(shard_path(template, SHARD)), *(make_run(seed, SIZES) for seed in range(3))
        )
    return shutil.copytree(template, tmp_path / "tier")


@pytest.fixture
def shard(tier: Path) -> Path:
    return shard_path(tier, SHARD)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Cli:
    return cli_of(main, capfd)
