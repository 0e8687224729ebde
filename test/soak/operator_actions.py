"""What an operator asks of servers under load, and what befalls them: erasures, flushes, pauses;
disks that are slow, full or lie, and ends without a warning."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clients import TENANTS, Life, Prompt, Violation

if TYPE_CHECKING:
    from prefill_decode import Reply

FLIP_EVERY_BYTES = 400_000
CHECKPOINT_CAP = 1 << 30  # of an NVMe tier that evicts nothing of what a life stores
MAX_PAUSES_S = (0.5, 2.0, 5.0)
"""Between two things; one for a round."""


class Operator(threading.Thread):
    """Acts until the round ends: one thing after the other, drawn at random."""

    def __init__(self, life: Life, seed: str) -> None:
        super().__init__(name=f"operator-{seed}", daemon=True)
        self._life, self._source = life, random.Random(seed)

    def run(self) -> None:
        life, source = self._life, self._source
        longest_s, topology = source.choice(MAX_PAUSES_S), life.world.setup.topology
        known = [act for act in ACTIONS if topology in ACTIONS[act][1]]
        try:
            while not life.ends.wait(source.uniform(0.0, longest_s)):
                act = source.choices(known, [ACTIONS[one][0] for one in known])[0]
                prompt = life.any_held(source)
                if prompt is not None:
                    life.done.append(f"{act.__name__} ...")
                    life.done.append(f"{act.__name__}: {act(life, source, prompt)}")
                    life.counts[act.__name__] += 1
        except BaseException as error:  # the round raises it again
            life.errors.append(error)
            life.ends.set()


def expect(reply: Reply, *statuses: int) -> Any:
    if reply.status not in statuses:
        raise Violation(f"status {reply.status}, not {statuses}: {reply.body}")
    return reply.body


def everywhere(life: Life, path: str, body: Any, *statuses: int) -> list[int]:
    """The same call to every server; the statuses."""
    replies = [life.world.ask(role, path, body) for role in life.world.servers]
    for reply in replies:
        expect(reply, *statuses)
    return [reply.status for reply in replies]


def erase(life: Life, source: random.Random, prompt: Prompt) -> tuple[bool, list[Prompt]]:
    """On every server; of those that share pages one tells the others. Whether it is durable, and
    what is gone."""
    ways = ["purge", "forget"] if life.world.setup.topology in ("one", "peers") else ["purge"]
    how = source.choice([*ways, *ways, "everything"])
    path, body, gone = f"/tier/{how}", prompt.body, [prompt]
    if how != "forget":
        path, body = "/tier/purge", TENANTS[prompt.tenant] if how == "purge" else {"all": True}
        gone = [one for one in life.held if how == "everything" or one.tenant == prompt.tenant]
    if life.world.setup.topology == "peers":
        role = source.choice(sorted(life.world.servers))
        reply = life.world.ask(role, path, body)
        expect(reply, 200, 503)
        return reply.status == 200, gone[-4:]
    return 503 not in everywhere(life, path, body, 200, 503), gone[-4:]


def erase_and_look(
    life: Life, source: random.Random, prompt: Prompt, late: str = ""
) -> list[Prompt]:
    """What was erased is found on no server, and nobody asks for it meanwhile: at once where pages
    are, but for a server that was down; what is known of others follows."""
    with life.closed(waits=True):
        down = life.world.servers.pop(late, None)
        gone: list[Prompt] = []

        def is_not_done() -> bool:
            is_done, gone[:] = erase(life, source, prompt)
            return not is_done

        life.until(is_not_done, "the erasure is not done")
        if down is not None:
            life.world.servers[late] = down
            life.world.restart(late)

        def known() -> list[Any]:
            found = []
            for role in life.world.servers:
                for one in gone:
                    held = expect(life.world.ask(role, "/tier/residency", one.body), 200)
                    here = any(held.get(tier) for tier in ("device", "host", "nvme", "object"))
                    if here and role != late:
                        raise Violation(f"{role} holds what was erased: {held}")
                    found += [held] if here or held.get("peer") else []
            return found

        life.until(known, "is known of what was erased")
    return gone


def flush(life: Life, source: random.Random, prompt: Prompt) -> list[int]:
    return everywhere(life, "/flush_cache", {}, 200, 400)


def clear_storage_backend(life: Life, source: random.Random, prompt: Prompt) -> list[int]:
    return everywhere(life, "/hicache/storage-backend/clear", {}, 200, 400)


def checkpoint(life: Life, source: random.Random, prompt: Prompt) -> list[int]:
    return everywhere(life, "/tier/checkpoint", prompt.body, 200, 503)


def hint(life: Life, source: random.Random, prompt: Prompt) -> list[int]:
    """A conversation is announced that may or may not come."""
    body = {**prompt.body, "wait_s": source.choice([0, 0, 0.5])}
    return everywhere(life, "/tier/prefetch", body, 200, 202, 503)


def abort_everything(life: Life, source: random.Random, prompt: Prompt) -> list[int]:
    with life.disturbance():
        return everywhere(life, "/abort_request", {"rid": "", "abort_all": True}, 200)


def pause(life: Life, source: random.Random, prompt: Prompt) -> str:
    """With something else meanwhile."""
    modes = ["in_place"] if life.world.pair else ["in_place", "retract", "abort"]
    mode, role = source.choice(modes), source.choice(sorted(life.world.servers))
    with life.disturbance() if mode == "abort" else contextlib.nullcontext():
        expect(life.world.ask(role, "/pause_generation", {"mode": mode}), 200)
        try:
            told = source.choice([flush, erase, checkpoint])(life, source, prompt)
            life.ends.wait(source.uniform(0.0, 1.0))
        finally:
            expect(life.world.ask(role, "/continue_generation", {}), 200)
    return f"{mode}, meanwhile {told}"


def release_and_resume(life: Life, source: random.Random, prompt: Prompt) -> list[int]:
    """Of idle servers, as SGLang asks for."""
    with life.closed(waits=True):
        life.until(lambda: 400 in flush(life, source, prompt), "refuses to flush")
        tags = source.choice([{}, {"tags": ["kv_cache"]}])
        everywhere(life, "/release_memory_occupation", tags, 200)
        return everywhere(life, "/resume_memory_occupation", tags, 200)


def sick_disk(life: Life, source: random.Random, prompt: Prompt) -> str:
    slow = {"read_s": source.choice([0.05, 0.3, 2.0])}
    crawling = {"write_bytes_s": source.choice([300e3, 3e6])}
    orders = source.choice([slow, crawling, {"errno": source.choice([errno.ENOSPC, errno.EIO])}])
    life.world.disk.order(**orders)
    life.ends.wait(source.uniform(0.5, 6.0))
    life.world.disk.order()
    return str(orders)


def flipped_bytes(life: Life, source: random.Random, prompt: Prompt) -> int:
    """Under a running server; a file that goes away meanwhile is no matter."""
    number = 0
    for path in life.world.stored_files(source.choice(sorted(life.world.servers))):
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            first = source.randrange(FLIP_EVERY_BYTES)
            for offset in range(first, path.stat().st_size, FLIP_EVERY_BYTES):
                if byte := os.pread(file.fileno(), 1, offset):
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), offset)
                    number += 1
    return number


def kill_and_restart(life: Life, source: random.Random, prompt: Prompt) -> str:
    """A file is lost or cut, or a prefix kept that the server called durable."""
    world, role = life.world, source.choice(sorted(life.world.servers))
    damage = source.choice(["", "", "lost", "cut"])
    is_promised = False
    if not damage and world.setup.nvme_bytes >= CHECKPOINT_CAP:
        reply = world.ask(role, "/tier/checkpoint", {**prompt.body, "tier": "nvme"})
        expect(reply, 200, 503)
        is_promised = reply.status == 200
    with life.disturbance(), life.closed(waits=False):
        world.servers[role].kill()
        files = world.stored_files(role)
        if damage and files:
            victim = source.choice(files)
            os.truncate(victim, source.randrange(victim.stat().st_size))
            if damage == "lost":
                victim.unlink()
        world.restart(role)
        found = expect(world.ask(role, "/tier/residency", prompt.body), 200)
        whole = len(prompt.tokens) // world.setup.page * world.setup.page
        if is_promised and found["nvme"] < whole:
            raise Violation(f"{role} lost a checkpoint of {whole} tokens: {found}")
    return f"{role}, a file {damage or 'as it was'}{', a checkpoint kept' if is_promised else ''}"


def stop_and_restart(life: Life, source: random.Random, prompt: Prompt) -> str:
    """Whoever was down learns what was erased meanwhile."""
    role = source.choice(sorted(life.world.servers))
    with life.disturbance():
        life.world.servers[role].stop()
        gone = erase_and_look(life, source, prompt, late=role)
    return f"{role}, {len(gone)} erased meanwhile"


ANY, PEERS = {"one", "ranks", "pair", "peers"}, {"peers"}
ACTIONS: dict[Callable[..., Any], tuple[float, set[str]]] = {
    erase: (4, ANY),
    erase_and_look: (2, PEERS),
    flush: (2, ANY),
    clear_storage_backend: (0.5, ANY),
    checkpoint: (2, ANY),
    hint: (3, ANY),
    abort_everything: (0.5, ANY),
    pause: (1.5, ANY),
    release_and_resume: (0.7, ANY),
    sick_disk: (2, ANY),
    flipped_bytes: (0.7, ANY),
    kill_and_restart: (0.35, ANY),
    stop_and_restart: (0.35, PEERS),
}
"""How often, and in which topologies."""
