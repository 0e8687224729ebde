"""The launcher refuses a directory it must not use with one sentence and code 2, untouched."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_pools import storage_config

from kit.small_model import write_small_model
from kit.waiting import finished
from sglang_tiered import launch_server
from sglang_tiered.codecs import PageLayout
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.errors import ConfigError, StoreLockedError
from sglang_tiered.flags import MiB
from sglang_tiered.integration import start
from sglang_tiered.integration.storage.shards import has_geometry, shard_name
from sglang_tiered.integration.storage.tiers import open_shard
from sglang_tiered.storage.base import Erasure, Reason, Run
from sglang_tiered.storage.promises import is_true
from sglang_tiered.storage.region import directory, format
from sglang_tiered.storage.region.directory import DirectoryLock
from sglang_tiered.storage.region.engine import RegionEngine

TIMEOUT_S = 20.0

ANY = ("--model-path", "no/model", "--port", "0")
"""Arguments with a free port, in case a server uses the default one."""


def fingerprint(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("line", "content", "said"),
    [
        ("--tier-colour blue", "", "unrecognized arguments: --tier-colour blue; --help tells"),
        ("--port 70000", "", "--port 70000 is not a port"),
        ("--tier-nvme-bytes -1GiB", "", "--tier-nvme-bytes: expected one argument"),
        ("--config {file}", None, "--config cannot be used"),
        ("--config {file}", ": [", "--config cannot be used"),
        ("--config={file}", "tier-nvme-region-bytes: 5MB", "5000000 must be a multiple"),
        ("--config {file}", "tier-trust-mm-hashes: on\ntp: two", "invalid int value: 'two'"),
        ("--config {file}", "tier-mode: off\ntier-dir: d", "--tier-dir d has no meaning with"),
        ("--config={file}", "tier-dir:", "tier-dir has no value in {file} of --config; write one"),
        ("--config {file}", "api-key:", "api-key has no value in"),
        ("--conf {file}", "tier-dir: [null]", "tier-dir has no value in"),
    ],
)
def test_an_unusable_command_line_is_one_sentence(
    line: str, content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    if content is not None:
        file.write_text(content)
    assert launch_server.main([*ANY, *line.format(file=file).split()]) == 2
    captured = capsys.readouterr()
    assert said.format(file=file) in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_missing_compiler_is_told_not_served_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without its tiers came up instead, and said so in one line of many."""
    from sglang.srt.mem_cache.cpp_utils import native_hash

    native_hash._load_native_hash_module.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    with pytest.raises(ConfigError, match=r"install a C\+\+ compiler .*or pass --tier-mode host"):
        launch_server._resolve([*ANY, "--tier-dir", str(tmp_path / "kv")])
    resolved = launch_server._resolve([*ANY, "--tier-mode", "host"])
    assert resolved.config.mode is TierMode.HOST


def test_directory_of_a_running_server_is_refused_untouched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "LOCK_TIMEOUT_S", 0.0)
    path = tmp_path / "kv"
    directory.prepare(path)
    with DirectoryLock(path):
        before = fingerprint(tmp_path)
        assert launch_server.main([*ANY, "--tier-dir", str(path)]) == 2
        said = capsys.readouterr().err
        assert "in use by process" in said and "--tier-dir" in said
        assert fingerprint(tmp_path) == before
    assert gc.isenabled(), "what it collects no garbage for is its imports"


def test_unsupported_sglang_is_refused_before_its_import(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start.compat, "SUPPORTED_VERSIONS", ("0.0.1",))
    monkeypatch.delenv(start.compat.CHECKED_VERSION, raising=False)  # scripts/compat runs this too
    assert launch_server.main([]) == 2
    assert "install sglang==0.0.1" in capsys.readouterr().err


def nvme_config(path: Path | str, **settings: Any) -> TieredConfig:
    nvme = NvmeConfig(directory=str(path), capacity_bytes=64 * MiB, region_bytes=4 * MiB)
    return TieredConfig(mode=TierMode.NVME, nvme=nvme, **settings)


def shard_of_two_ranks(path: Path) -> Path:
    """What a server of two ranks left in a tier directory."""
    directory.prepare(path)
    name = shard_name(tp_rank=0, tp_size=2, pp_rank=0, pp_size=1, dp_rank=0, replica=0)
    shard = directory.shard_path(path, name)
    shard.mkdir()
    (shard / format.region_name(0)).write_bytes(b"pages")
    return shard


@pytest.mark.parametrize("kind", [(), ("--smg-grpc-mode",), ("--grpc-mode",), ("--use-ray",)])
def test_a_command_line_sglang_refuses_removes_no_shard(
    tmp_path: Path, kind: tuple[str, ...]
) -> None:
    """One mistyped model, and all that a larger server had stored was gone."""
    from sglang.srt.server_args import prepare_server_args

    (tmp_path / "empty").mkdir()
    path = tmp_path / "kv"
    shard = shard_of_two_ranks(path)
    flags = ["--model-path", str(tmp_path / "empty"), "--port", "0", "--tier-dir", str(path)]
    resolved = launch_server._resolve([*flags, *kind])
    with contextlib.ExitStack() as held:
        start.claim_directory(resolved.config, held)
        with pytest.raises(ConfigError, match="SGLang refuses these arguments"):
            launch_server._run(prepare_server_args(resolved.sglang_arguments), resolved.config)
    assert (shard / format.region_name(0)).read_bytes() == b"pages"


@pytest.mark.parametrize("is_locked", [True, False])
def test_shard_in_use_or_with_foreign_files_stays(tmp_path: Path, is_locked: bool) -> None:
    shard = shard_of_two_ranks(tmp_path / "kv")
    file = shard / (format.region_name(0) if is_locked else "notes.txt")
    file.write_text("mine")
    with DirectoryLock(shard) if is_locked else contextlib.nullcontext():
        assert directory.remove_shards(tmp_path / "kv", keep=lambda name: False) == []
    assert file.read_text() == "mine"


def test_shards_of_other_sizes_go_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.launch_server

    path = tmp_path / "kv"
    shard = shard_of_two_ranks(path)
    config = nvme_config(path)
    found: list[bool] = []
    monkeypatch.setattr(sglang.launch_server, "run_server", lambda _: found.append(shard.exists()))
    monkeypatch.setattr(start, "check", lambda *told: told)
    monkeypatch.setattr(TieredConfig, "to_environment", lambda _: None)
    with contextlib.ExitStack() as held:
        start.claim_directory(config, held)
        assert shard.exists()
        for only, mode in ((True, False), (False, True)):  # an encoder has no tiers
            settings = {"encoder_only": only, "smg_grpc_mode": mode, "tokenizer_path": "there"}
            launch_server._run(SimpleNamespace(**settings), config)
    assert found == [True, False]


def test_fork_outliving_its_server_holds_no_directory(tmp_path: Path) -> None:
    """The lock is the launcher's, and its processes are forks of it: one that still ended when the
    launcher had been killed kept the next server away."""
    program = """
import contextlib, os, sys
from sglang_tiered.config import NvmeConfig, TieredConfig, TierMode
from sglang_tiered.integration import start

nvme = NvmeConfig(directory=sys.argv[1], capacity_bytes=1 << 26, region_bytes=1 << 23)
with contextlib.ExitStack() as held:
    start.claim_directory(TieredConfig(mode=TierMode.NVME, nvme=nvme), held)
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.read(0, 1)  # until the test lets go
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "kv")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as launcher:
        fork = int(launcher.stdout.readline())
        with pytest.raises(StoreLockedError, match=f"in use by process {launcher.pid};"):
            DirectoryLock(tmp_path / "kv", timeout_s=0)
        launcher.kill()
        launcher.wait()
        os.kill(fork, 0)  # lives
        DirectoryLock(tmp_path / "kv", timeout_s=0).release()


GROUPS = {(2, 0, 0), (2, 1, 0), (1, 0, 0), (1, 1, 0)}


@pytest.mark.parametrize(
    ("ranks", "kept"),
    [
        ({"num_ranks": 1}, {(1, 0, 0)}),
        ({"num_ranks": 2}, {(1, 0, 0), (1, 0, 1)}),  # --dp-size 2
        # Whether its ranks share pages, in the shard of one rank, shows when they know the model.
        ({"num_ranks": 2, "tp_size": 2}, {(2, 0, 0), (1, 0, 0)}),
        # --tp-size 2 --dp-size 2
        ({"num_ranks": 4, "tp_size": 2}, {(2, 0, 0), (2, 0, 1), (1, 0, 0), (1, 0, 1)}),
        # --tp-size 4 --dp-size 2 --enable-dp-attention, on one machine and on two
        ({"num_ranks": 4, "tp_size": 2, "dp_size": 2}, GROUPS),
        ({"num_ranks": 2, "tp_size": 2, "dp_size": 2}, GROUPS),
    ],
)
def test_shards_are_those_of_a_servers_own_replicas(
    ranks: dict[str, int], kept: set[tuple[int, int, int]]
) -> None:
    places = [(tp, dp, replica) for tp in (1, 2) for dp in range(3) for replica in range(3)]

    def is_kept(tp: int, dp: int, replica: int) -> bool:
        name = shard_name(tp_rank=0, tp_size=tp, pp_rank=0, pp_size=1, dp_rank=dp, replica=replica)
        return has_geometry(name, **{"tp_size": 1, "pp_size": 1, "dp_size": 1, **ranks})

    assert {place for place in places if is_kept(*place)} == kept


def test_a_gone_replica_brings_no_purged_pages_back(tmp_path: Path) -> None:
    tenant, layout = b"t" * 16, PageLayout.unknown()

    @contextlib.contextmanager
    def serving(num_ranks: int) -> Iterator[list[RegionEngine]]:
        """As the launcher and its schedulers do."""
        settings = nvme_config(tmp_path / "kv", num_ranks=num_ranks)
        with contextlib.ExitStack() as held:
            start.claim_directory(settings, held)
            start.remove_other_shards(settings)
            engines = []
            for _ in range(num_ranks):
                opened = open_shard(settings, storage_config(), b"n" * 32, 4096, layout, tp_size=1)
                held.callback(opened[0].close)
                engines.append(opened[0])
            yield engines

    def store(engine: RegionEngine, number: int, num_pages: int) -> tuple[bytes, ...]:
        names = [f"{number}/{page}".encode() for page in range(num_pages)]
        keys = tuple(hashlib.sha256(name).digest() for name in names)
        run = Run(keys, ((memoryview(bytes(MiB)),),) * num_pages, tenant)
        assert set(finished(engine.submit_store(run))) == {Reason.OK}
        return keys

    with serving(2) as engines:
        stored = [store(engine, number, 24) for number, engine in enumerate(engines)]
    with serving(1) as (engine,):
        assert engine.lookup(stored[0]).num_hits == 24
        for number in range(2, 6):
            store(engine, number, 16)
        on_disk = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("region-*"))
        assert on_disk <= 64 * MiB
        assert is_true(engine.erase(Erasure(tenant=tenant)), TIMEOUT_S)
    with serving(2) as engines:
        for engine in engines:
            assert [engine.lookup(keys).num_hits for keys in stored] == [0, 0]


ROWS = "--enable-return-routed-experts would answer with rows of other prompts"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--smg-grpc-mode --enable-return-routed-experts", ROWS),
        ("--grpc-mode --enable-return-routed-experts", ROWS),
        ("--hicache-mem-layout page_head", "--hicache-mem-layout page_head needs sgl_kernel"),
        ("--decode-attention-backend triton", "--decode-attention-backend triton needs compiled"),
        ("--tp 2 --dp-size 2 --enable-dp-attention", "--attn-dp-size 2 needs a GPU"),
    ],
)
def test_what_kills_a_scheduler_is_refused_before(tmp_path: Path, line: str, sentence: str) -> None:
    """Or answers wrongly; whatever the kind of server."""
    from sglang.srt.server_args import prepare_server_args

    model = write_small_model(tmp_path / "model")
    flags = ["--model-path", str(model), "--port", "0", "--tier-dir", str(tmp_path / "kv")]
    resolved = launch_server._resolve([*flags, *line.split()])
    with pytest.raises(ConfigError, match=sentence):
        launch_server._run(prepare_server_args(resolved.sglang_arguments), resolved.config)
