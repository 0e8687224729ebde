"""``stat``, ``verify`` and ``gc`` of a URL, over a directory and over a real S3 API."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from object_bucket import Bucket
from object_proxy import Exchange, FaultProxy, expire, status
from object_server import CREDENTIALS, ObjectServer, s3_environment

from kit.runs import NAMESPACE
from sglang_tiered.storage.object.names import Layout
from sglang_tiered.storage.region import RegionEngine
from sglang_tiered.storage.region.directory import shard_path
from sglang_tiered.storage.region.notes import PageSize, add_page_size

if TYPE_CHECKING:
    from pathlib import Path

Cli = Callable[..., Any]
Open = Callable[..., RegionEngine]
TENANT = b"\x22" * 16


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket.in_directory(tmp_path)


def url(bucket: Bucket) -> str:
    assert bucket.directory is not None
    return bucket.directory.as_uri()


def answer(cli: Cli, *arguments: object, code: int = 0) -> dict[str, Any]:
    outcome = cli(*arguments, "--json")
    assert (outcome.code, outcome.err) == (code, "")
    found: dict[str, Any] = json.loads(outcome.out)
    return found


def contents(bucket: Bucket) -> dict[str, bytes]:
    assert bucket.directory is not None
    files = (path for path in bucket.directory.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


def test_stat_counts_what_is_there_and_writes_nothing(cli: Cli, bucket: Bucket) -> None:
    for tenant in (TENANT, bytes(16)):
        bucket.make(tenant=tenant, num_pages=3, page_bytes=1000)
    bucket.make(announced=False)
    bucket.purge(TENANT, 1)
    other = Bucket(bucket.store, bucket.client, layout=Layout(b"\x44" * 32))
    other.make(num_pages=5, page_bytes=77)
    before = contents(bucket)
    report = answer(cli, "stat", url(bucket))
    assert contents(bucket) == before
    ours, others = report["namespaces"]
    assert (ours["namespace"], others["namespace"]) == (NAMESPACE.hex(), "44" * 32)
    assert (ours["objects"], ours["unannounced_objects"], ours["pages"]) == (3, 1, 6)
    assert (ours["payload_bytes"], ours["tenants"], ours["purges"]) == (6000, 1, 1)
    assert (others["pages"], others["payload_bytes"]) == (5, 385)
    assert report["total"]["pages"] == 11
    assert 0 <= ours["newest_age_s"] <= ours["oldest_age_s"] < 60
    out = cli("stat", url(bucket)).out
    assert NAMESPACE.hex()[:16] in out
    assert "1 objects have no manifest" in out


def test_bucket_path_is_taken_as_servers_do(
    cli: Cli, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.make(num_pages=3, page_bytes=1000)
    assert bucket.directory is not None
    monkeypatch.chdir(bucket.directory.parent)
    for place in (bucket.directory, bucket.directory.name):
        assert answer(cli, "stat", place)["total"]["pages"] == 3
        assert answer(cli, "verify", place)
        assert answer(cli, "gc", place, "--ttl", "14d")
    assert cli("dump", bucket.directory).code == 2


def test_tokens_of_a_bucket_are_those_servers_noted(
    cli: Cli, bucket: Bucket, tmp_path: Path, open_engine: Open
) -> None:
    bucket.make(num_pages=6, page_bytes=1000)
    other = Bucket(bucket.store, bucket.client, layout=Layout(b"\x44" * 32))
    other.make(num_pages=5, page_bytes=77)
    engine = open_engine(shard_path(tmp_path / "kv", "tp0of1-pp0of1-dp0-0"))
    add_page_size(engine.notes, NAMESPACE, PageSize(64, 1000))
    add_page_size(engine.notes, b"\x44" * 32, PageSize(64, 1000))  # others are there, or encoded
    report = answer(cli, "stat", url(bucket), "--tier-dir", tmp_path / "kv")
    assert [entry["tokens"] for entry in report["namespaces"]] == [384, None]
    assert "384" in cli("stat", url(bucket), "--tier-dir", tmp_path / "kv").out
    assert answer(cli, "stat", url(bucket))["namespaces"][0]["tokens"] is None
    outcome = cli("stat", tmp_path / "kv", "--tier-dir", tmp_path / "kv")
    assert (outcome.code, "--tier-dir is for a URL" in outcome.err) == (2, True)


def test_verify_of_what_is_whole(cli: Cli, bucket: Bucket) -> None:
    for _ in range(5):
        bucket.make(tenant=TENANT)
    bucket.purge(TENANT, 1)
    report = answer(cli, "verify", url(bucket), "--jobs", "2")
    assert report["ok"]
    assert (report["total"]["objects"], report["total"]["pages"]) == (5, 10)
    assert "fine: all 10 pages verify" in cli("verify", url(bucket)).out


def flipped(data: bytes, position: int) -> bytes:
    damaged = bytearray(data)
    damaged[position] ^= 4
    return bytes(damaged)


@pytest.mark.parametrize(
    ("folder", "change", "what", "bad_pages"),
    [
        ("objects", lambda data: flipped(data, 10), "does not match its checksum", 1),
        ("objects", lambda data: flipped(data, -30), "does not end with a copy", 0),
        ("objects", lambda data: data[:-1], "bytes instead of", 0),
        ("objects", lambda data: data[:1500], "is not there in full", 1),
        ("objects", lambda data: data[:500], "bytes instead of", 2),
        ("objects", None, "is gone, and its manifest is not", 0),
        ("manifests", lambda data: flipped(data, 60), "does not verify", 0),
        ("manifests", lambda data: data[:-1], "does not verify", 0),
        ("purges", lambda data: flipped(data, 60), "may be served again", 0),
    ],
)
def test_verify_finds_damage(
    cli: Cli,
    bucket: Bucket,
    folder: str,
    change: Callable[[bytes], bytes] | None,
    what: str,
    bad_pages: int,
) -> None:
    bucket.make()
    bucket.purge(TENANT, 1)
    assert bucket.directory is not None
    (file,) = (bucket.directory / bucket.layout.folder / folder).iterdir()
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    report = answer(cli, "verify", url(bucket), code=1)
    problems = [p["problem"] for entry in report["namespaces"] for p in entry["problems"]]
    assert any(what in problem for problem in problems), problems
    assert report["total"]["damaged_pages"] == bad_pages
    assert "damage: " in cli("verify", url(bucket)).out


def test_verify_finds_a_manifest_under_anothers_name(cli: Cli, bucket: Bucket) -> None:
    first, second = bucket.make(), bucket.make()
    bucket.store.put(
        bucket.layout.manifest(first), bucket.store.get(bucket.layout.manifest(second)).bytes()
    )
    report = answer(cli, "verify", url(bucket), code=1)
    assert report["namespaces"][0]["problems"][0]["problem"] == "is that of another object"


def test_gc_plans_and_deletes_only_when_told_to(cli: Cli, bucket: Bucket) -> None:
    ids = [bucket.make(page_bytes=5000) for _ in range(4)]
    before = contents(bucket)
    size = bucket.store.head(bucket.layout.object(ids[0]))["size"]
    limit = ("--max-bytes", str(2 * size))
    plan = answer(cli, "gc", url(bucket), *limit)
    assert contents(bucket) == before
    assert not plan["deleted"]
    removals = plan["namespaces"][0]["removals"]
    assert [r["path"].rpartition("/")[2] for r in removals] == ids[:2]
    assert "2 could go" in cli("gc", url(bucket), *limit).out
    done = answer(cli, "gc", url(bucket), *limit, "--delete")
    assert done["deleted"]
    assert bucket.manifests() == set(ids[2:])
    assert "nothing to give back" in cli("gc", url(bucket), *limit).out
    assert "2 wait for their removal" in cli("gc", url(bucket)).out


def test_gc_by_age(cli: Cli, bucket: Bucket) -> None:
    old, new = bucket.make(), bucket.make()
    assert bucket.directory is not None
    for file in bucket.directory.rglob(old):
        os.utime(file, (1e9, 1e9))
    answer(cli, "gc", url(bucket), "--ttl", "30d", "--delete")
    assert bucket.manifests() == {new}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("dump", "s3://bucket/kv"), "dump is for a directory"),
        (("verify", "s3://bucket/kv", "--region", "1"), "--region is for a directory"),
        (("gc", "s3://bucket/kv", "--keep-namespace", "00" * 8), "--keep-namespace is for"),
        (("gc", "/", "--ttl", "1d"), "are for a URL"),
        (("gc", "s3://bucket/kv", "--ttl", "soon"), "is not a time"),
        (("gc", "s3://bucket/kv", "--sse", "AES256"), "set AWS_SERVER_SIDE_ENCRYPTION"),
        (("gc", "s3://bucket/kv", "--max-bytes", "lots"), "is not a size"),
        (("stat", "ftp://bucket/kv"), "is not a place for the object tier"),
        (("stat", "s3://me:hunter2@bucket/kv"), "credentials come from the environment"),
        (("stat", "memory://x"), "in the memory of another process"),
        (("stat", "{missing}"), "is not a directory"),
        (("stat", "{empty}"), "holds nothing of an object tier"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    cli: Cli, tmp_path: Path, arguments: tuple[str, ...], what: str
) -> None:
    places = {"{missing}": (tmp_path / "none").as_uri(), "{empty}": tmp_path.as_uri()}
    outcome = cli(*(places.get(argument, argument) for argument in arguments))
    assert (outcome.code, outcome.out) == (2, "")
    assert what in outcome.err
    assert outcome.err.count("\n") == 1
    assert "hunter2" not in outcome.err
    assert not (tmp_path / "none").exists()


# -- over HTTP ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def remote(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Bucket, FaultProxy, str]]:
    with FaultProxy(server.address) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        name = server.make_bucket()
        yield Bucket.in_s3(server, name), proxy, f"s3://{name}/tier"


def test_every_command_on_s3(cli: Cli, remote: tuple[Bucket, FaultProxy, str]) -> None:
    bucket, _, place = remote
    bucket.make()
    assert answer(cli, "stat", place)["total"]["pages"] == 2
    assert answer(cli, "verify", place)["ok"]
    assert answer(cli, "gc", place, "--delete")["namespaces"][0]["num_objects"] == 1


def test_a_bucket_of_encrypted_writes_can_be_collected(
    cli: Cli, remote: tuple[Bucket, FaultProxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy, place = remote
    bucket.make()

    def policy(exchange: Exchange) -> None:
        if exchange.request.header("x-amz-server-side-encryption") == "AES256":
            exchange.answer(exchange.forward())
        else:
            status(403, "AccessDenied")(exchange)

    proxy.add("put", "", policy)
    limit = ("--max-bytes", "1", "--delete")
    outcome = cli("gc", place, *limit)
    assert (outcome.code, outcome.out) == (2, "")
    assert "cannot be used: put was refused: no permission" in outcome.err
    assert len(bucket.manifests()) == 1
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "AES256")
    assert answer(cli, "gc", place, *limit)["deleted"]
    assert not bucket.manifests()


def test_a_refusal_shows_no_secret(
    cli: Cli, remote: tuple[Bucket, FaultProxy, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy, place = remote
    bucket.make()
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-mine")
    for fault in (expire(["token-of-mine"]), status(403, "InvalidAccessKeyId")):
        proxy.clear()
        proxy.add("*", "", fault)
        for command in ("stat", "verify", "gc"):
            outcome = cli(command, place)
            assert (outcome.code, outcome.out) == (2, "")
            assert "the credentials are wrong or expired" in outcome.err
            assert outcome.err.count("\n") == 1
            for secret in (*CREDENTIALS.values(), "token-of-mine", str(proxy.port)):
                assert secret not in outcome.err


def test_a_bucket_failing_midway_is_one_sentence(
    cli: Cli, remote: tuple[Bucket, FaultProxy, str]
) -> None:
    bucket, proxy, place = remote
    for _ in range(3):
        bucket.make()
    proxy.add("get", "/objects/", status(503, "SlowDown"))
    outcome = cli("verify", place)
    assert (outcome.code, outcome.out) == (2, "")
    assert "answered with status 503" in outcome.err
    assert outcome.err.count("\n") == 1
