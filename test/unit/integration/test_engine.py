"""An in-process engine comes to the settings of a server, and refuses what that refuses."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_tiered import Engine, launch_server
from sglang_tiered.config import ENVIRONMENT_VARIABLE
from sglang_tiered.errors import ConfigError, RequestError, StoreLockedError
from sglang_tiered.integration import engine, start
from sglang_tiered.storage.region import directory
from sglang_tiered.storage.region.directory import DirectoryLock

NO_FLAG = {"log_level"}
"""What an engine sets as SGLang's does: it prints nothing by default."""


@pytest.mark.parametrize(
    "keywords",
    [
        {"tier_nvme_bytes": "1GiB"},  # its default follows the free disk
        {"tier_mode": "off", "page_size": 32},
        {"tier_nvme_bytes": "1GiB", "tp_size": "1", "max_total_tokens": "2048"},
        {"tier_mode": "host", "tier_host_bytes": 64 << 20, "max_total_tokens": 4096},
        {"tier_nvme_bytes": "64MiB", "tier_trust_mm_hashes": True, "tp_size": 1},
        {"tp_size": 2, "tier_nvme_bytes": 1 << 30, "hicache_write_policy": "write_back"},
        {"tier_nvme_bytes": "1GB", "cuda_graph_bs_decode": [1, 2], "tier_object_url": None},
    ],
)
def test_keywords_resolve_as_the_command_line(keywords: dict[str, Any], tmp_path: Path) -> None:
    if keywords.get("tier_mode", "nvme") == "nvme":
        keywords = {"tier_dir": str(tmp_path / "kv"), **keywords}
    keywords = {"model_path": "no/model", **keywords}
    words = ["--port", "0"]
    for name, value in keywords.items():
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        words.append("--" + name.replace("_", "-"))
        words += ["on" if one is True else str(one) for one in values]
    expected = launch_server._resolve(words)
    of_line = prepare_server_args(expected.sglang_arguments)

    fields, resolved = engine.resolve_keywords(keywords)
    assert resolved.config == expected.config
    made = ServerArgs(**{**fields, "port": 0})
    names = [field.name for field in record_fields(ServerArgs) if field.name not in NO_FLAG]
    assert not [name for name in names if getattr(made, name) != getattr(of_line, name)]


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"tier_nvme_byte": 1}, "no argument tier_nvme_byte; see docs/flags.md"),
        ({"model_path": None}, "Engine needs model_path; pass"),
        ({"tier_mode": "tape"}, "--tier-mode tape is unknown"),
        ({"tp_size": 1.5}, "tp_size=1.5 is refused; pass a whole number"),
        ({"mem_fraction_static": []}, "mem_fraction_static=[] is refused; pass a number"),
        ({"tp_size": -1}, "--tp-size -1 must be at least 1"),
        ({"nnodes": 2}, "nnodes=2 needs a server"),
        ({"grpc_mode": True}, "grpc_mode is a server's"),
        ({"enable_hierarchical_cache": False}, "enable_hierarchical_cache=False leaves no tiers"),
    ],
)
def test_refused_engine_touches_nothing(
    keywords: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "kv"
    for _ in range(2):  # the first leaves the place to the second
        with pytest.raises(ConfigError) as caught:
            Engine(**{"model_path": "no/model", "tier_dir": str(path), **keywords})
        assert sentence in str(caught.value)
        assert ENVIRONMENT_VARIABLE not in os.environ
    assert not list(path.rglob("region-*"))


@pytest.mark.timeout(60)
def test_calls_of_threads_share_one_loop() -> None:
    loop, turn, together = asyncio.new_event_loop(), threading.Lock(), threading.Barrier(5)

    async def call(number: int) -> int:
        for _ in range(20):
            await asyncio.sleep(0.001)
        return number

    def made(number: int) -> int:
        together.wait(20)
        return engine.run_on(loop, call(number), turn)

    def generate() -> int:
        """As SGLang's runs the loop, which stops under those that joined."""
        together.wait(20)
        return engine._InTurn(loop, turn).run_until_complete(call(4))

    with ThreadPoolExecutor(5) as threads:
        found = [*map(threads.submit, [made] * 4, range(4)), threads.submit(generate)]
        assert [one.result(30) for one in found] == [0, 1, 2, 3, 4]
    with pytest.raises(RequestError, match="shut down before it answered"):
        engine.run_on(loop, asyncio.sleep(60), turn, lambda: False)
    loop.run_until_complete(asyncio.sleep(0.01))  # it is cancelled
    loop.close()
    with pytest.raises(RequestError, match="the event loop of this engine is closed"):
        engine.run_on(loop, call(0), turn)


def test_directory_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an engine that found it in use, and by one that could not start."""
    monkeypatch.setattr(start, "LOCK_TIMEOUT_S", 0.0)
    directory.prepare(tmp_path / "kv")
    with DirectoryLock(tmp_path / "kv"), pytest.raises(StoreLockedError):
        Engine(model_path="no/model", tier_dir=tmp_path / "kv")
    with pytest.raises(ConfigError, match="SGLang refuses"):
        Engine(model_path=tmp_path / "empty", tier_dir=tmp_path / "kv")
    with DirectoryLock(tmp_path / "kv"):
        pass
