"""The front keeps a picker, whatever becomes of one."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from sglang_tiered.route import envoy
from sglang_tiered.route.envoy import read_members, write_members
from sglang_tiered.route.settings import RouteConfig

DEADLINE_S = 60.0


def test_picker_is_tried_again_after_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not: the task that keeps it had ended, and nobody was told."""
    monkeypatch.setattr(envoy, "AGAIN_S", 0.0)
    start = asyncio.create_subprocess_exec
    started: list[Any] = []

    async def refused_once(*_: Any, **__: Any) -> Any:
        started.append(None)
        if len(started) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        again.set()
        return await start("sleep", "60")

    async def keep() -> None:
        front = envoy._Front(RouteConfig(servers="s"), "envoy", tmp_path / "e", tmp_path, [])
        front._picker = await start("true")
        keeping = asyncio.create_task(front._keep_picker())
        async with asyncio.timeout(DEADLINE_S):
            await again.wait()
            while front._picker.returncode is not None:
                await asyncio.sleep(0)
        keeping.cancel()
        front._picker.kill()
        await front._picker.wait()

    again = asyncio.Event()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused_once)
    asyncio.run(keep())
    assert len(started) == 2


def test_picker_that_hangs_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A supervisor starts what ended with 0 no more."""
    monkeypatch.setattr(envoy, "START_S", 0.0)
    front = envoy._Front(RouteConfig(servers="s"), "envoy", tmp_path / "e", tmp_path, [])
    front._picker_command = ["sleep", "60"]
    assert asyncio.run(front.run()) == 1
    assert "does not listen" in caplog.text


NOBODY = '{"resources": [{"endpoints": [{"lb_endpoints": [1]}]}]}'


@pytest.mark.parametrize("text", ["", "[]", "{}", NOBODY])
def test_damaged_file_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "pool.json").write_text(text)
    assert read_members(tmp_path) == {}
    write_members(tmp_path, "pool", ["[::1]:80", "192.0.2.1:81"])
    assert read_members(tmp_path) == {"[::1]:80": "pool", "192.0.2.1:81": "pool"}
