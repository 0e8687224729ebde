"""What an operator asks of servers under load, and what befalls them: erasures, flushes, pauses,
weights, memory; disks that are slow, full or lie, and ends without a warning."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conversations import TENANTS, Prompt
from life import Violation

if TYPE_CHECKING:
    from life import Life

    from prefill_decode import Reply

NUM_LOOKS = 4
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
        longest_s = source.choice(MAX_PAUSES_S)
        names = [name for name, (_, _, can_be) in ACTIONS.items() if can_be(life)]
        try:
            while not life.ends.wait(source.uniform(0.0, longest_s)):
                name = source.choices(names, [ACTIONS[one][0] for one in names])[0]
                life.record.did(f"{name} ...")
                life.record.did(f"{name}: {ACTIONS[name][1](life, source)}")
                life.record.count("actions", name)
        except BaseException as error:  # the round raises it again
            life.fail(error)


def expect(reply: Reply, *statuses: int) -> Reply:
    if reply.status not in statuses:
        raise Violation(f"status {reply.status}, not {statuses}: {reply.body}")
    return reply


def everywhere(life: Life, path: str, body: Any, *statuses: int) -> str:
    """The same call to every server; the statuses."""
    replies = [expect(life.world.ask(role, path, body), *statuses) for role in life.world.servers]
    return ", ".join(str(reply.status) for reply in replies)


def of(prompt: Prompt, **more: Any) -> dict[str, Any]:
    return {"input_ids": prompt.tokens, **TENANTS[prompt.tenant], **more}


def flush_until_empty(life: Life) -> None:
    """While nothing new comes."""

    def refused() -> list[str]:
        servers = life.world.servers
        return [r for r in servers if life.world.ask(r, "/flush_cache", {}).status != 200]

    life.until(refused, "refuses to flush")


# ---- Erasures ----


def erase(life: Life, source: random.Random, how: str, prompt: Prompt | None) -> str:
    """On every server; of those that share pages one tells the others. ``how``: a forget of the
    prompt, a purge of its tenant, or of everything."""
    tenant = source.randrange(len(TENANTS)) if prompt is None else prompt.tenant
    tenants = range(len(TENANTS)) if how == "everything" else [tenant]
    began = {one: life.asked.erasure_begins(one) for one in tenants}
    tokens, path, body = None, "/tier/purge", TENANTS[tenant]
    if how == "forget":
        assert prompt is not None
        tokens, path, body = prompt.tokens, "/tier/forget", of(prompt)
    elif how == "everything":
        body = {"all": True}
    if shares(life):
        role = source.choice(sorted(life.world.servers))
        told = f"{role} {expect(life.world.ask(role, path, body), 200, 503).status}"
    else:
        told = everywhere(life, path, body, 200, 503)
    for one in tenants if "503" not in told else ():
        life.asked.erased(one, began[one], tokens)
    return told


def purge_tenant(life: Life, source: random.Random) -> str:
    return erase(life, source, "purge", None)


def purge_everything(life: Life, source: random.Random) -> str:
    return erase(life, source, "everything", None)


def forget(life: Life, source: random.Random, prompt: Prompt) -> str:
    return erase(life, source, "forget", prompt)


def erase_and_look(life: Life, source: random.Random) -> str:
    """What was erased is found on no server, and nobody asks for it meanwhile."""
    with life.traffic.closed(waits=True):
        how, gone = erase_for_good(life, source)
        is_nowhere(life, gone)
    return how


def erase_for_good(life: Life, source: random.Random) -> tuple[str, list[Prompt]]:
    """While no request runs. How, and some of what is gone."""
    prompt = life.conversations.any_held(source)
    if prompt is None:
        return "nothing to name", []
    how = source.choice(["forget", "forget", "purge", "everything"])
    life.until(lambda: "503" in erase(life, source, how, prompt), f"{how} is not done")
    tenants = range(len(TENANTS)) if how == "everything" else [prompt.tenant]
    gone = [one for tenant in tenants for one in life.conversations.of(tenant)]
    return how, [prompt] if how == "forget" else gone[:NUM_LOOKS]


def is_nowhere(life: Life, prompts: list[Prompt], late: str = "") -> None:
    """At once where pages are, but for a server that was down; what is known of others follows."""

    def known() -> dict[str, Any]:
        found = {}
        for role in life.world.servers:
            for prompt in prompts:
                held = expect(life.world.ask(role, "/tier/residency", of(prompt)), 200).body
                here = any(held.get(tier) for tier in ("device", "host", "nvme", "object"))
                if here and role != late:
                    raise Violation(f"{role} holds what was erased: {held}")
                if here or held.get("peer"):
                    found[role] = held
        return found

    life.until(known, "is known of what was erased")


# ---- What leaves the server as it is ----


def flush(life: Life, source: random.Random) -> str:
    return everywhere(life, "/flush_cache", {}, 200, 400)


def clear_storage_backend(life: Life, source: random.Random) -> str:
    return everywhere(life, "/hicache/storage-backend/clear", {}, 200, 400)


def checkpoint(life: Life, source: random.Random, prompt: Prompt) -> str:
    return everywhere(life, "/tier/checkpoint", of(prompt), 200, 503)


def hint(life: Life, source: random.Random, prompt: Prompt) -> str:
    """A conversation is announced that may or may not come."""
    body = of(prompt, wait_s=source.choice([0, 0, 0.5]))
    return everywhere(life, "/tier/prefetch", body, 200, 202, 503)


def look_around(life: Life, source: random.Random, prompt: Prompt) -> str:
    everywhere(life, "/tier/tenants", None, 200)
    return everywhere(life, "/tier/residency", of(prompt), 200)


def named(action: Callable[..., str]) -> Callable[[Life, random.Random], str]:
    """An action on a conversation that was held."""

    def act(life: Life, source: random.Random) -> str:
        prompt = life.conversations.any_held(source)
        return "nothing to name" if prompt is None else action(life, source, prompt)

    return act


def abort_everything(life: Life, source: random.Random) -> str:
    role = source.choice(sorted(life.world.servers))
    with life.disturbance():
        reply = life.world.ask(role, "/abort_request", {"rid": "", "abort_all": True})
        return f"{role} {expect(reply, 200).status}"


def pause(life: Life, source: random.Random) -> str:
    """With something else meanwhile."""
    is_pair = life.world.pair is not None
    mode = "in_place" if is_pair else source.choice(["in_place", "retract", "abort"])
    role = source.choice(sorted(life.world.servers))
    with life.disturbance() if mode == "abort" else contextlib.nullcontext():
        expect(life.world.ask(role, "/pause_generation", {"mode": mode}), 200)
        try:
            meanwhile = source.choice([flush, purge_tenant, named(look_around), None])
            told = meanwhile(life, source) if meanwhile else "nothing"
            life.ends.wait(source.uniform(0.0, 1.0))
        finally:
            expect(life.world.ask(role, "/continue_generation", {}), 200)
    return f"{mode}, meanwhile {told}"


# ---- Weights and memory ----


def update_weights(life: Life, source: random.Random) -> str:
    """SGLang lets what runs end first."""
    name = source.choice(sorted(life.models))
    life.num_updates += 1
    body = {"model_path": str(life.models[name]), "flush_cache": True}
    reply = life.world.ask("server", "/update_weights_from_disk", body)
    life.weights = name
    life.num_updates += 1
    # SGLang answers 400 where it could not flush; the weights are new all the same.
    expect(reply, 200, 400)
    if reply.status == 400 and "not flushed" not in str(reply.body):
        raise Violation(f"the weights were not updated: {reply.body}")
    return f"{name} {reply.status}"


def release_and_resume(life: Life, source: random.Random) -> str:
    """Of an idle server, as SGLang asks for."""
    with life.traffic.closed(waits=True):
        flush_until_empty(life)
        tags = source.choice([{}, {"tags": ["kv_cache"]}])
        told = everywhere(life, "/release_memory_occupation", tags, 200)
        if source.random() < 0.5:
            told += f", purge {purge_tenant(life, source)}"
        return f"{told}, resumed {everywhere(life, '/resume_memory_occupation', tags, 200)}"


# ---- What befalls them ----


def sick_disk(life: Life, source: random.Random) -> str:
    orders = source.choice(
        [
            {"read_s": source.choice([0.05, 0.3, 2.0])},
            {"write_bytes_s": source.choice([300e3, 3e6])},
            {"errno": source.choice([errno.ENOSPC, errno.EIO])},
        ]
    )
    life.world.disk.order(**orders)
    life.ends.wait(source.uniform(0.5, 6.0))
    life.world.disk.order()
    return str(orders)


def flipped_bytes(life: Life, source: random.Random) -> str:
    role = source.choice(sorted(life.world.servers))
    return f"{role}: {_flip(life.world.stored_files(role), source)} flipped"


def _flip(files: list[Path], source: random.Random) -> int:
    """Under a running server or not; a file that goes away meanwhile is no matter."""
    number = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            first = source.randrange(FLIP_EVERY_BYTES)
            for offset in range(first, path.stat().st_size, FLIP_EVERY_BYTES):
                if byte := os.pread(file.fileno(), 1, offset):
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), offset)
                    number += 1
    return number


def kill_and_restart(life: Life, source: random.Random) -> str:
    role = source.choice(sorted(life.world.servers))
    damage = source.choice(["", "", "flipped", "lost", "cut"])
    promised = _promise(life, source, role) if not damage else None
    with life.disturbance(), life.traffic.closed(waits=False):
        life.world.servers[role].kill()
        life.num_updates += 2
        life.weights = "first"
        files = life.world.stored_files(role)
        if damage == "flipped":
            _flip(files, source)
        elif damage and files:
            victim = source.choice(files)
            victim.unlink() if damage == "lost" else os.truncate(
                victim, source.randrange(victim.stat().st_size)
            )
        life.world.restart(role)
        if promised is not None:
            found = expect(life.world.ask(role, "/tier/residency", of(promised)), 200).body
            page = life.world.setup.page
            if found["nvme"] < len(promised.tokens) // page * page:
                raise Violation(f"{role} lost a checkpoint of {len(promised.tokens)}: {found}")
    return f"{role}, files {damage or 'as they were'}{', a checkpoint kept' if promised else ''}"


def _promise(life: Life, source: random.Random, role: str) -> Prompt | None:
    """A prefix that the server calls durable, where its tier takes what it is given."""
    prompt = life.conversations.any_held(source)
    if prompt is None or life.weights != "first" or life.world.setup.nvme_bytes < CHECKPOINT_CAP:
        return None
    reply = life.world.ask(role, "/tier/checkpoint", of(prompt, tier="nvme"))
    return prompt if expect(reply, 200, 503).status == 200 else None


def stop_and_restart(life: Life, source: random.Random) -> str:
    """Whoever was down learns what was erased meanwhile."""
    role = source.choice(sorted(life.world.servers))
    with life.disturbance(), life.traffic.closed(waits=True):
        down = life.world.servers.pop(role)
        down.stop()
        how, gone = erase_for_good(life, source)
        life.world.servers[role] = down
        life.world.restart(role)
        is_nowhere(life, gone, late=role)
    return f"{role}, {how} meanwhile"


def always(life: Life) -> bool:
    return True


def alone(life: Life) -> bool:
    return life.world.setup.topology in ("one", "ranks")


def shares(life: Life) -> bool:
    return life.world.setup.topology == "peers"


def forgets(life: Life) -> bool:
    return life.world.setup.topology in ("one", "peers")


ACTIONS: dict[str, tuple[float, Callable[[Life, random.Random], str], Callable[[Life], bool]]] = {
    "purge of a tenant": (2, purge_tenant, always),
    "purge of everything": (0.5, purge_everything, always),
    "forget": (2, named(forget), forgets),
    "erasure that is looked for": (2, erase_and_look, shares),
    "flush": (2, flush, always),
    "clear of the storage backend": (0.5, clear_storage_backend, always),
    "checkpoint": (2, named(checkpoint), always),
    "hint": (3, named(hint), always),
    "look around": (1, named(look_around), always),
    "abort of everything": (0.5, abort_everything, always),
    "pause": (1.5, pause, always),
    "update of weights": (1, update_weights, alone),
    "release of memory": (0.7, release_and_resume, always),
    "sick disk": (2, sick_disk, always),
    "flipped bytes": (0.7, flipped_bytes, always),
    "kill and restart": (0.35, kill_and_restart, always),
    "stop, erasure and restart": (0.35, stop_and_restart, shares),
}
"""By name: how often, what is done, and where it can be."""
