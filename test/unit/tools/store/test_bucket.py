"""``stat``, ``verify`` and ``gc`` of a URL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_engines import opened, paths, run_of, store
from object_proxy import FaultProxy, expire, status
from object_server import CREDENTIALS, ObjectServer, s3_environment

from kit.commands import Cli
from kit.runs import NAMESPACE
from kit.stores import open_engine
from sglang_tiered.storage.base import Erasure
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region.directory import prepare, shard_path
from sglang_tiered.storage.region.format import PAGE_SIZES_NAME
from sglang_tiered.storage.region.notes import PageSize, with_page_size

TENANT = b"\x22" * 16
OTHER = b"\x44" * 32


def fill(url: str, *numbers: int, namespace: bytes = NAMESPACE, tenant: bytes = bytes(16)) -> None:
    """Runs of four pages of 3,000 bytes."""
    with opened(url, namespace=namespace) as engine:
        store(engine, *(run_of(number, tenant=tenant) for number in numbers))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "bucket").as_uri()


def answer(cli: Cli, *arguments: object, code: int = 0) -> dict[str, Any]:
    outcome = cli(*arguments, "--json")
    assert (outcome.code, outcome.err) == (code, "")
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


def test_stat_counts_what_is_there_and_writes_nothing(cli: Cli, url: str, tmp_path: Path) -> None:
    fill(url, 1)
    fill(url, 2, tenant=TENANT)
    fill(url, 3, namespace=OTHER)
    with opened(url) as engine, opened(url) as stale:
        assert is_true(engine.erase(Erasure.of(run_of(4).keys)), 20.0)
        store(stale, run_of(4))
    before = contents(tmp_path)
    report = answer(cli, "stat", url)
    assert contents(tmp_path) == before
    ours, others = report["namespaces"]
    assert (ours["namespace"], others["namespace"]) == (NAMESPACE.hex(), OTHER.hex())
    assert (ours["pages"], ours["erased_pages"], ours["tenants"]) == (12, 4, 1)
    assert ours["stored_bytes"] == 36_000
    assert (report["total"]["pages"], report["erasures"]) == (16, 1)


def test_tokens_are_counted_by_what_servers_noted(cli: Cli, url: str, tmp_path: Path) -> None:
    fill(url, 1)
    fill(url, 2, namespace=OTHER)
    noted = tmp_path / "kv"
    prepare(noted)
    note = with_page_size(b"", NAMESPACE, PageSize(64, 3000))
    note = with_page_size(note, OTHER, PageSize(64, 1000))  # of another length: not told
    open_engine(shard_path(noted, "tp0of1-pp0of1-dp0-0")).write_note(PAGE_SIZES_NAME, note)
    found = [answer(cli, "stat", url, *more) for more in ((), ("--tier-dir", noted))]
    assert [[each["tokens"] for each in report["namespaces"]] for report in found] == [
        [None, None],
        [4 * 64, None],
    ]


def damaged(data: bytes) -> bytes:
    return data[:10] + bytes([data[10] ^ 4]) + data[11:]


@pytest.mark.parametrize(
    ("where", "change", "what"),
    [
        ("pages/*", damaged, "does not match"),
        ("pages/*", lambda data: data[:-1], "does not match"),
        ("pins", damaged, "what it pinned may go"),
        ("../erased", damaged, "servers miss all that is older"),
    ],
)
def test_verify_finds_damage_and_nothing_else(
    cli: Cli, url: str, tmp_path: Path, where: str, change: Callable[[bytes], bytes], what: str
) -> None:
    fill(url, 1)
    with opened(url) as engine:
        pinned = engine.pin("a", run_of(1).keys)
        assert is_true(pinned, 20.0)  # type: ignore[arg-type]
        assert is_true(engine.erase(Erasure.of(run_of(9).keys)), 20.0)
    report = answer(cli, "verify", url, "--jobs", "2")
    assert (report["ok"], report["total"]["pages"]) == (True, 4)
    folder = tmp_path / "bucket" / "v2" / NAMESPACE.hex()
    file = min(
        (folder.parent if where[0] == "." else folder).glob(f"{where.removeprefix('../')}/*")
    )
    file.write_bytes(change(file.read_bytes()))
    report = answer(cli, "verify", url, code=1)
    (problem,) = report["problems"]
    assert what in problem["problem"]
    assert report["total"]["damaged_pages"] == (where == "pages/*")


def test_gc_plans_and_deletes_only_when_told_to(cli: Cli, url: str, tmp_path: Path) -> None:
    fill(url, 1, 2)
    before = contents(tmp_path)
    limit = ("--max-bytes", "12000")
    plan = answer(cli, "gc", url, *limit)
    assert contents(tmp_path) == before
    assert not plan["deleted"]
    assert len(plan["namespaces"][0]["removals"]) == 4
    assert "4 could go" in cli("gc", url, *limit).out
    assert "deleted 4" in cli("gc", url, *limit, "--delete").out
    assert len(list((tmp_path / "bucket").rglob("pages/*/*"))) == 4


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("gc", "/", "--ttl", "1d", "--delete"), "gc is for the URL of an object tier"),
    (("gc", "s3://bucket/kv", "--ttl", "soon"), "is not a time"),
    (("gc", "s3://bucket/kv", "--max-bytes", "lots"), "is not a size"),
    (("stat", "/", "--tier-dir", "/"), "--tier-dir is for a URL"),
    (("stat", "s3://bucket?key=hunter2"), "come from the environment"),
    (("stat", "s3://me:hunter2@bucket/kv"), "come from the environment"),
]


@pytest.mark.parametrize(("arguments", "what"), WRONG)
def test_what_cannot_work_is_one_sentence(cli: Cli, arguments: tuple[str, ...], what: str) -> None:
    refusal = cli(*arguments).refusal
    assert what in refusal and "hunter2" not in refusal


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def remote(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FaultProxy, str]]:
    with FaultProxy(server.address) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        place = f"s3://{server.make_bucket()}/tier"
        fill(place, 1)
        yield proxy, place


def test_every_command_on_s3(cli: Cli, remote: tuple[FaultProxy, str]) -> None:
    _, place = remote
    assert answer(cli, "stat", place)["total"]["pages"] == 4
    assert answer(cli, "verify", place)["ok"]
    assert answer(cli, "gc", place, "--max-bytes", "1", "--delete")["deleted"]
    with opened(place) as engine:
        assert not paths(engine)


def test_a_refusal_shows_no_secret(
    cli: Cli, remote: tuple[FaultProxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, place = remote
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-mine")
    for fault in (expire(["token-of-mine"]), status(403, "InvalidAccessKeyId")):
        proxy.clear()
        proxy.add("*", "", fault)
        for command in ("stat", "verify", "gc"):
            refusal = cli(command, place).refusal
            assert "the credentials are wrong or expired" in refusal
            for secret in (*CREDENTIALS.values(), "token-of-mine", str(proxy.port)):
                assert secret not in refusal
