"""``gc`` plans without touching, deletes only what it planned, and only what is ours."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kit.commands import Cli
from kit.runs import OTHER_NAMESPACE, make_run
from kit.stores import (
    REGION,
    SIZES,
    digest,
    flip,
    keep,
    keep_again,
    open_engine,
    plant_region,
    store,
)
from sglang_tiered.integration.storage.shards import shard_name
from sglang_tiered.storage.base import NO_TENANT, Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import erase_log
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.erase_log import Bound, Erased
from sglang_tiered.storage.region.files import ERASED_NAME, LENDING_NAME, MANIFEST_NAME, NOTE_NAMES
from sglang_tiered.storage.region.format import region_name
from sglang_tiered.storage.region.pins import PinRefusal, file_of
from sglang_tiered.tools.store import gc
from sglang_tiered.tools.store.scan import ReadOnlyDevice


def plan(cli: Cli, path: Path, *flags: str) -> dict[str, str]:
    """What could go, by its path within the directory, and why."""
    outcome = cli("gc", path, "--json", *flags)
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    return {os.path.relpath(c["path"], path): c["reason"] for c in report["candidates"]}


@pytest.fixture
def untidy(tier: Path, shard: Path) -> Path:
    """A tier with something to give back of every kind within one shard: region 0 is damaged,
    1 was stored again in 3, 4 is of another namespace."""
    keep_again(open_engine(shard), 1)
    keep(open_engine(shard, namespace=OTHER_NAMESPACE), make_run(7, SIZES))
    flip(shard / region_name(0), 8)
    (shard / "PROBE").write_bytes(b"")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lender:
        directory = os.open(shard, os.O_RDONLY)
        lender.bind(f"/proc/self/fd/{directory}/{LENDING_NAME}")  # whose own name may be too long
        os.close(directory)
    for name in (*NOTE_NAMES, "CHECKPOINT.tmp", "NAMESPACE.tmp"):
        (shard / name).write_bytes(b"x")
    for name in ("STORE.tmp-123", "WEIGHTS.tmp-123", "WEIGHTS"):
        (tier / name).write_bytes(b"x")
    return tier


@pytest.fixture
def expected(shard: Path) -> dict[str, str]:
    left = ("CHECKPOINT.tmp", "LENDING", "NAMESPACE.tmp", "PROBE")
    return {
        **dict.fromkeys(("STORE.tmp-123", "WEIGHTS.tmp-123"), "a file that was never finished"),
        **{f"{shard.name}/{name}": "left by a process that died" for name in left},
        f"{shard.name}/{region_name(0)}": "its header does not verify",
        f"{shard.name}/{region_name(1)}": "every page of it was stored again later",
    }


def test_a_tidy_store_gives_nothing_back(cli: Cli, tier: Path, shard: Path) -> None:
    assert plan(cli, tier) == {}
    assert "nothing to give back" in cli("gc", tier).out
    keep_again(open_engine(shard), 1, num_pages=2)
    assert plan(cli, tier) == {}, "of three pages one is in that region alone"


def test_the_plan_touches_nothing(
    cli: Cli, untidy: Path, shard: Path, expected: dict[str, str]
) -> None:
    before = digest(untidy)
    assert plan(cli, untidy) == expected
    outcome = cli("gc", untidy)
    assert "8 could go" in outcome.out
    assert "nothing was deleted" in outcome.out
    assert digest(untidy) == before
    flip(shard / region_name(3), REGION - 1)
    planned = plan(cli, untidy)
    assert f"{shard.name}/{region_name(1)}" not in planned, "its later copy is damaged"


def test_deleting_leaves_a_store_that_serves_the_rest(
    cli: Cli, untidy: Path, shard: Path, expected: dict[str, str]
) -> None:
    assert json.loads(cli("gc", untidy, "--json").out)["kept"] == []
    assert plan(cli, untidy, "--delete") == expected
    for name in expected:
        assert not (untidy / name).exists(), name
    assert all((shard / name).exists() for name in NOTE_NAMES), "notes are ours and stay"
    assert plan(cli, untidy) == {}
    assert cli("verify", untidy).code == 0
    engine = open_engine(shard)
    for seed in (1, 2):
        assert engine.lookup(make_run(seed, SIZES).keys).num_hits == 3
    engine.check_integrity()


def test_namespaces_to_keep_give_the_others_back(cli: Cli, untidy: Path, shard: Path) -> None:
    reasons = plan(cli, untidy, "--keep-namespace", "11" * 4)
    assert reasons[f"{shard.name}/{region_name(4)}"] == "holds no page of a namespace to keep"
    assert f"{shard.name}/{region_name(2)}" not in reasons
    both = plan(cli, untidy, "--keep-namespace", "11" * 4, "--keep-namespace", "22" * 32)
    assert f"{shard.name}/{region_name(4)}" not in both


def test_a_mistyped_namespace_does_not_empty_the_store(cli: Cli, tier: Path, shard: Path) -> None:
    def regions() -> dict[str, object]:
        return {name: about for name, about in digest(shard).items() if ".kv" in name}

    before = regions()
    assert (
        "matches nothing stored"
        in cli("gc", tier, "--delete", "--keep-namespace", "12345678").refusal
    )
    assert regions() == before
    assert cli("gc", tier, "--keep-namespace", "1111111").code == 2


def test_a_running_server_keeps_everything(cli: Cli, untidy: Path, shard: Path) -> None:
    engine = open_engine(shard)
    before = digest(shard)
    assert f"in use by process {os.getpid()}" in cli("gc", untidy, "--delete").refusal
    assert digest(shard) == before
    assert "--delete is refused until it ends" in cli("gc", untidy).out
    engine.check_integrity()


def test_regions_of_a_running_server_are_not_planned(cli: Cli, tier: Path, shard: Path) -> None:
    store(open_engine(shard, namespace=OTHER_NAMESPACE), make_run(0, [4096]))
    (shard / "PROBE").write_bytes(b"")
    (shard / region_name(9)).write_bytes(bytes(REGION))
    assert plan(cli, tier, "--keep-namespace", "11" * 4) == {}


def test_only_older_formats_go(cli: Cli, tier: Path, shard: Path) -> None:
    name = f"{shard.name}/{region_name(9)}"
    plant_region(shard, 1)
    assert plan(cli, tier) == {name: "format 1, not 3"}
    plant_region(shard, 77)
    assert plan(cli, tier, "--delete") == {}
    assert (tier / name).exists()
    assert "is of format 77, newer than" in cli("gc", tier).out


def test_what_is_not_ours_stays(cli: Cli, tier: Path, shard: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (shard / region_name(20)).symlink_to(tmp_path / "target")
    os.mkfifo(shard / region_name(21))
    (shard / region_name(22)).mkdir()
    (shard / "PROBE").symlink_to(tmp_path / "target")
    (shard / "thesis.tex").write_text("years")
    (tier / "STORE.tmp-x").write_text("mine")
    (shard / "\x1b[31m").write_text("red")
    names = set(os.listdir(shard))
    assert plan(cli, tier, "--delete") == {}
    assert set(os.listdir(shard)) == names
    assert (tier / "STORE.tmp-x").exists()
    outcome = cli("gc", tier)
    for text in ("thesis.tex does not belong", "a symbolic link", "a FIFO", "PROBE is not a regu"):
        assert text in outcome.out, text
    assert "\x1b" not in outcome.out


def test_a_file_swapped_after_the_plan_stays(
    cli: Cli, untidy: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan = gc._make_plan

    def swap(*arguments: Any, **options: Any) -> Any:
        made = make_plan(*arguments, **options)
        (shard / "new").write_bytes(b"new")
        (shard / "new").rename(shard / region_name(0))
        return made

    monkeypatch.setattr(gc, "_make_plan", swap)
    outcome = cli("gc", untidy, "--delete")
    assert outcome.code == 1
    assert "NOT DELETED: is another file than it was" in outcome.out
    assert (shard / region_name(0)).read_bytes() == b"new"
    assert not (shard / region_name(1)).exists()


def test_shards_of_sizes_not_used_last_go(cli: Cli, tier: Path, shard: Path) -> None:
    """The names are those the server gives its shards."""
    for rank in (0, 1):
        name = shard_name(tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, dp_rank=0, replica=0)
        keep(open_engine(shard_path(tier, name)), make_run(3, SIZES))
    (tier / "shard-mine").mkdir()
    reasons = plan(cli, tier)
    assert set(reasons) == {shard.name}
    reason = "for tensor parallel 1, pipeline parallel 1; those used last are 2 and 1"
    assert reason in reasons.values()
    assert set(plan(cli, tier, "--delete")) == {shard.name}
    kept = {f"shard-tp{rank}of2-pp0of1-dp0-0" for rank in (0, 1)}
    assert set(os.listdir(tier)) == {"LOCK", MANIFEST_NAME, "shard-mine", *kept}
    assert cli("verify", tier).code == 0


def test_a_stray_file_keeps_its_old_shard(cli: Cli, tier: Path, shard: Path) -> None:
    keep(open_engine(shard_path(tier, "tp0of2-pp0of1-dp0-0")), make_run(3, SIZES))
    (shard / "thesis.tex").write_text("years")
    outcome = cli("gc", tier, "--delete")
    assert outcome.code == 1
    assert "NOT DELETED" in outcome.out
    assert (shard / "thesis.tex").read_text() == "years"
    open_engine(shard)
    assert plan(cli, tier) == {}, "nor is one that is in use planned"


def test_a_lone_shard_with_foreign_files_is_kept(
    cli: Cli, tier: Path, shard: Path, tmp_path: Path
) -> None:
    flip(shard / region_name(0), 8)
    (shard / "thesis.tex").write_text("years")
    assert set(plan(cli, shard, "--delete")) == {region_name(0)}  # the tier's manifest says so
    flip(shard / region_name(1), 8)
    stray = tmp_path / "documents"
    shard.rename(stray)
    assert (
        "'thesis.tex', which does not belong to the store" in cli("gc", stray, "--delete").refusal
    )
    assert (stray / region_name(1)).exists()
    (stray / "thesis.tex").unlink()
    assert set(plan(cli, stray, "--delete")) == {region_name(1)}


def test_what_cannot_be_deleted_is_told(
    cli: Cli, untidy: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.name == region_name(0):
            raise PermissionError(13, "Permission denied", os.fspath(self))
        original(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    outcome = cli("gc", untidy, "--delete", "--json")
    assert outcome.code == 1
    report = json.loads(outcome.out)
    failures = [c["failure"] for c in report["candidates"] if not c["deleted"]]
    assert failures == ["Permission denied"]
    assert report["deleted_bytes"] < report["candidate_bytes"]
    assert sum(candidate["deleted"] for candidate in report["candidates"]) == 7


def test_regions_that_were_purged_altogether_could_go(cli: Cli, tier: Path, shard: Path) -> None:
    bound = Bound(1, 3 * 4096)  # behind all of region 0 and within region 1
    (shard / ERASED_NAME).write_bytes(erase_log.pack(Erased({NO_TENANT: bound, b"a" * 16: bound})))
    name = f"{shard.name}/{region_name(0)}"
    gone = (name, f"{shard.name}/{region_name(1)}")
    assert plan(cli, tier) == dict.fromkeys(gone, "every page of it was purged or forgotten")
    report = json.loads(cli("stat", tier, "--json").out)
    assert report["total"]["purged_pages"] == 6
    tenant = {"tenant": "00" * 16, "pages": 9, "payload_bytes": 3 * sum(SIZES)}
    assert report["total"]["tenants"] == [tenant]
    outcome = cli("gc", tier, "--delete")
    assert "does not belong to the store" not in outcome.out
    assert (shard / ERASED_NAME).exists()
    assert not (tier / name).exists()


def test_forgotten_pages_and_pins_are_known(cli: Cli, tier: Path, shard: Path) -> None:
    engine = open_engine(shard)
    gone, kept = make_run(50, SIZES), make_run(51, SIZES[:2])
    for run in (gone, kept):
        store(engine, run)
    before = json.loads(cli("stat", tier, "--json").out)["shards"][0]["purged_pages"]
    assert is_true(engine.erase(Erasure.of(gone.keys[:2])), 20.0)
    for name in ("a", "b"):
        made = engine.pin(name, kept.keys)
        assert not isinstance(made, PinRefusal)
        assert is_true(made, 20.0)
    engine.close()
    report = json.loads(cli("stat", tier, "--json").out)
    assert report["ok"]
    assert report["shards"][0]["purged_pages"] == before + 2
    pins = {"valid": 2, "pages": 2, "damaged": 0, "newer": 0, "unread": 0}
    assert report["shards"][0]["pins"] == pins
    assert "2 pins name 2 pages" in cli("stat", tier).out
    assert cli("verify", tier).code == 0
    (shard / (file_of("c") + ".tmp")).write_bytes(b"x")
    (shard / file_of("b")).write_bytes(b"x")
    assert "1 pins do not verify" in cli("stat", tier).out
    assert "does not belong to the store" not in cli("gc", tier).out
    left = f"{shard.name}/{file_of('c')}.tmp"
    assert plan(cli, tier)[left] == "left by a process that died"
    assert file_of("b") in os.listdir(shard), "looking changes nothing"


def test_unreadable_purges_plan_no_removal(
    cli: Cli, tier: Path, shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails must not look like a purge of everything."""
    engine = open_engine(shard)
    store(engine, make_run(50, SIZES))
    assert is_true(engine.erase(Erasure(tenant=b"t" * 16)), 20.0)
    engine.close()
    before = sorted(shard.iterdir())
    real = ReadOnlyDevice.read_file

    def read(self: ReadOnlyDevice, name: str) -> bytes:
        if name == ERASED_NAME:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, name)

    monkeypatch.setattr(ReadOnlyDevice, "read_file", read)
    outcome = cli("gc", tier, "--delete")
    assert outcome.code != 0
    assert "which says what was erased, cannot be read" in outcome.err
    assert sorted(shard.iterdir()) == before
