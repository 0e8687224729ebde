"""What befalls servers: disks that are slow, full or lie, and ends without a warning."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from conversations import TENANTS
from life import Violation
from operator_actions import erase_for_good, expect, is_nowhere, shares

if TYPE_CHECKING:
    from life import Life

__all__ = ["FAULTS"]

FLIP_EVERY_BYTES = 400_000
CHECKPOINT_CAP = 1 << 30  # of an NVMe tier that evicts nothing of what a life stores


def slow_disk(life: Life, source: random.Random) -> str:
    return _misbehaves(life, source, read_s=source.choice([0.05, 0.3, 2.0]))


def crawling_disk(life: Life, source: random.Random) -> str:
    return _misbehaves(life, source, write_bytes_s=source.choice([300e3, 3e6]))


def failing_disk(life: Life, source: random.Random) -> str:
    return _misbehaves(life, source, errno=source.choice([errno.ENOSPC, errno.EIO]))


def _misbehaves(life: Life, source: random.Random, **orders: float) -> str:
    seconds = source.uniform(0.5, 6.0)
    life.world.order_disk(**orders)
    life.ends.wait(seconds)
    life.world.order_disk()
    return f"{orders} for {seconds:.1f} s"


def flipped_bytes(life: Life, source: random.Random) -> str:
    role = source.choice(sorted(life.world.servers))
    return f"{role}: {_flip(life.world.stored_files(role), source)} flipped"


def _flip(files: list[Path], source: random.Random) -> int:
    """Under a running server or not; a file that goes away meanwhile is no matter."""
    number = 0
    for path in files:
        try:
            with path.open("r+b", buffering=0) as file:
                for offset in range(
                    source.randrange(FLIP_EVERY_BYTES), path.stat().st_size, FLIP_EVERY_BYTES
                ):
                    byte = os.pread(file.fileno(), 1, offset)
                    if byte:
                        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), offset)
                        number += 1
        except FileNotFoundError:
            continue
    return number


def kill_and_restart(life: Life, source: random.Random) -> str:
    role = source.choice(sorted(life.world.servers))
    promised = _checkpoint(life, source, role)
    damage = source.choice(["", "", "flipped", "lost", "cut"])
    with life.disturbance(), life.traffic.closed(waits=False):
        life.world.kill(role)
        life.num_updates += 2
        life.weights = "first"
        files = life.world.stored_files(role)
        if damage == "flipped":
            _flip(files, source)
        elif damage and files:
            victim = source.choice(files)
            if damage == "lost":
                victim.unlink()
            else:
                os.truncate(victim, source.randrange(victim.stat().st_size))
        life.world.restart(role)
        if promised is not None and not damage:
            _expect_kept(life, role, promised)
    return f"{role}, files {damage or 'as they were'}{', a checkpoint kept' if promised else ''}"


def stop_and_restart(life: Life, source: random.Random) -> str:
    """An ordinary stop leaves nothing; whoever was down learns what was erased meanwhile."""
    role = source.choice(sorted(life.world.servers))
    with life.disturbance(), life.traffic.closed(waits=True):
        if left := life.world.stop(role):
            raise Violation(f"{role} left {left}")
        down = life.world.servers.pop(role)
        how, gone = erase_for_good(life, source)
        life.world.servers[role] = down
        life.world.restart(role)
        is_nowhere(life, gone, late=role)
    return f"{role}, {how} meanwhile"


def _checkpoint(life: Life, source: random.Random, role: str) -> dict[str, object] | None:
    """A prefix that the server calls durable, where its tier takes what it is given."""
    prompt = life.conversations.any_held(source)
    if prompt is None or life.weights != "first" or life.world.setup.nvme_bytes < CHECKPOINT_CAP:
        return None
    body: dict[str, object] = {"input_ids": prompt.tokens, **TENANTS[prompt.tenant]}
    reply = expect(life.world.ask(role, "/tier/checkpoint", {**body, "tier": "nvme"}), 200, 503)
    return body if reply.status == 200 else None


def _expect_kept(life: Life, role: str, body: dict[str, object]) -> None:
    page, tokens = life.world.setup.page, body["input_ids"]
    assert isinstance(tokens, list)
    found = expect(life.world.ask(role, "/tier/residency", body), 200).body
    if found["nvme"] < len(tokens) // page * page:
        raise Violation(f"{role} lost a checkpoint of {len(tokens)} tokens: {found}")


def always(life: Life) -> bool:
    return True


FAULTS: dict[str, tuple[float, Callable[[Life, random.Random], str], Callable[[Life], bool]]] = {
    "slow disk": (0.7, slow_disk, always),
    "crawling disk": (0.7, crawling_disk, always),
    "failing disk": (0.7, failing_disk, always),
    "flipped bytes": (0.7, flipped_bytes, always),
    "kill and restart": (0.35, kill_and_restart, always),
    "stop, erasure and restart": (0.35, stop_and_restart, shares),
}
"""As the operator's actions."""
