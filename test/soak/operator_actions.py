"""What an operator asks of servers under load: purges, flushes, pauses, weights, memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from conversations import TENANTS, Prompt
from life import Violation

if TYPE_CHECKING:
    from life import Life

    from prefill_decode import Reply

__all__ = ["ACTIONS", "everywhere", "expect", "flush_until_empty"]

LOOK_S = 0.05
NUM_LOOKS = 5
"""So many conversations of a tenant are looked for."""


def expect(reply: Reply, *statuses: int) -> Reply:
    if reply.status not in statuses:
        raise Violation(f"status {reply.status}, not {statuses}: {reply.body}")
    return reply


def everywhere(life: Life, path: str, body: Any, *statuses: int) -> str:
    """The same call to every server; the statuses."""
    replies = [expect(life.world.ask(role, path, body), *statuses) for role in life.world.servers]
    return ", ".join(str(reply.status) for reply in replies)


def flush_until_empty(life: Life) -> None:
    """While nothing new comes."""
    life.until(
        lambda: any(
            life.world.ask(role, "/flush_cache", {}).status != 200 for role in life.world.servers
        ),
        "refuses to flush",
    )


# ---- What leaves the server as it is ----


def purge_tenant(life: Life, source: random.Random) -> str:
    tenant = source.randrange(len(TENANTS))
    return _purge(life, source, [tenant], TENANTS[tenant])


def purge_everything(life: Life, source: random.Random) -> str:
    return _purge(life, source, list(range(len(TENANTS))), {"all": True})


def forget(life: Life, source: random.Random) -> str:
    prompt = life.conversations.any_held(source)
    return "nothing to name" if prompt is None else _forget(life, source, prompt)


def _purge(life: Life, source: random.Random, tenants: list[int], whom: dict[str, Any]) -> str:
    began = {tenant: life.asked.erasure_begins(tenant) for tenant in tenants}
    told = _erase(life, source, "/tier/purge", whom)
    if "503" not in told:
        for tenant in tenants:
            life.asked.erased(tenant, began[tenant])
    return told


def _forget(life: Life, source: random.Random, prompt: Prompt) -> str:
    began = life.asked.erasure_begins(prompt.tenant)
    body = {"input_ids": prompt.tokens, **TENANTS[prompt.tenant]}
    told = _erase(life, source, "/tier/forget", body)
    if "503" not in told:
        life.asked.erased(prompt.tenant, began, prompt.tokens)
    return told


def _erase(life: Life, source: random.Random, path: str, body: dict[str, Any]) -> str:
    """On every server; of those that share pages one tells the others."""
    if not shares(life):
        return everywhere(life, path, body, 200, 503)
    role = source.choice(sorted(life.world.servers))
    return f"{role} {expect(life.world.ask(role, path, body), 200, 503).status}"


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
    life.until(lambda: "503" in _erase_once(life, source, how, prompt), f"{how} is not done")
    tenants = range(len(TENANTS)) if how == "everything" else [prompt.tenant]
    gone = [one for tenant in tenants for one in life.conversations.of(tenant)]
    return how, [prompt] if how == "forget" else gone[:NUM_LOOKS]


def _erase_once(life: Life, source: random.Random, how: str, prompt: Prompt) -> str:
    if how == "forget":
        return _forget(life, source, prompt)
    tenant = prompt.tenant
    if how == "purge":
        return _purge(life, source, [tenant], TENANTS[tenant])
    return _purge(life, source, list(range(len(TENANTS))), {"all": True})


def is_nowhere(life: Life, prompts: list[Prompt], late: str = "") -> None:
    """At once where pages are, but for a server that was down; what is known of others follows."""

    def known() -> dict[str, Any]:
        found = {}
        for role in life.world.servers:
            for prompt in prompts:
                body = {"input_ids": prompt.tokens, **TENANTS[prompt.tenant]}
                held = expect(life.world.ask(role, "/tier/residency", body), 200).body
                here = any(held.get(tier) for tier in ("device", "host", "nvme", "object"))
                if here and role != late:
                    raise Violation(f"{role} holds what was erased: {held}")
                if here or held.get("peer"):
                    found[role] = held
        return found

    life.until(known, "is known of what was erased")


def flush(life: Life, source: random.Random) -> str:
    return everywhere(life, "/flush_cache", {}, 200, 400)


def clear_storage_backend(life: Life, source: random.Random) -> str:
    return everywhere(life, "/hicache/storage-backend/clear", {}, 200, 400)


def checkpoint(life: Life, source: random.Random) -> str:
    prompt = life.conversations.any_held(source)
    if prompt is None:
        return "nothing to name"
    body = {"input_ids": prompt.tokens, **TENANTS[prompt.tenant]}
    return everywhere(life, "/tier/checkpoint", body, 200, 503)


def hint(life: Life, source: random.Random) -> str:
    """Conversations are announced that may or may not come."""
    told = []
    for _ in range(source.randrange(1, 4)):
        prompt = life.conversations.any_held(source)
        if prompt is not None:
            body = {"input_ids": prompt.tokens, "wait_s": source.choice([0, 0, 0.5])}
            body |= TENANTS[prompt.tenant]
            told.append(everywhere(life, "/tier/prefetch", body, 200, 202, 503))
    return "; ".join(told) or "nothing to name"


def look_around(life: Life, source: random.Random) -> str:
    prompt = life.conversations.any_held(source)
    told = everywhere(life, "/tier/tenants", None, 200)
    if prompt is not None:
        body = {"input_ids": prompt.tokens, **TENANTS[prompt.tenant]}
        told += " " + everywhere(life, "/tier/residency", body, 200)
    return told


def abort_everything(life: Life, source: random.Random) -> str:
    role = source.choice(sorted(life.world.servers))
    with life.disturbance():
        reply = expect(life.world.ask(role, "/abort_request", {"rid": "", "abort_all": True}), 200)
    return f"{role} {reply.status}"


# ---- Pauses ----


@contextlib.contextmanager
def paused(life: Life, mode: str, role: str) -> Iterator[None]:
    expect(life.world.ask(role, "/pause_generation", {"mode": mode}), 200)
    try:
        yield
    finally:
        expect(life.world.ask(role, "/continue_generation", {}), 200)


def pause(life: Life, source: random.Random) -> str:
    """With something else meanwhile."""
    is_pair = life.world.pair is not None
    mode = "in_place" if is_pair else source.choice(["in_place", "retract", "abort"])
    role = source.choice(sorted(life.world.servers))
    with contextlib.ExitStack() as stack:
        if mode == "abort":
            stack.enter_context(life.disturbance())
        stack.enter_context(paused(life, mode, role))
        told = mode
        if source.random() < 0.6:
            meanwhile = source.choice([flush, purge_tenant, look_around])
            told += f", {meanwhile.__name__} {meanwhile(life, source)}"
        life.ends.wait(source.uniform(0.0, 1.0))
    return told


# ---- Weights ----


def update_weights(life: Life, source: random.Random) -> str:
    """SGLang lets what runs end first."""
    return _update(life, source.choice(sorted(life.models)), "server")


def update_weights_of_paused(life: Life, source: random.Random) -> str:
    """What had begun goes on with the other weights."""
    life.num_mixing += 1
    with paused(life, "retract", "server"):
        return _update(life, source.choice(sorted(life.models)), "server")


def _update(life: Life, name: str, role: str) -> str:
    life.num_updates += 1
    body = {"model_path": str(life.models[name]), "flush_cache": True}
    reply = life.world.ask(role, "/update_weights_from_disk", body)
    life.weights = name
    life.num_updates += 1
    # SGLang answers 400 where it could not flush; the weights are new all the same.
    expect(reply, 200, 400)
    if reply.status == 400 and "not flushed" not in str(reply.body):
        raise Violation(f"the weights were not updated: {reply.body}")
    return f"{name} {reply.status}"


# ---- Memory ----


def release_and_resume(life: Life, source: random.Random) -> str:
    """Of an idle server, as SGLang asks for."""
    with life.traffic.closed(waits=True):
        return _release_and_resume(life, source)


def release_paused_and_resume(life: Life, source: random.Random) -> str:
    with paused(life, "retract", "server"):
        return _release_and_resume(life, source)


def _release_and_resume(life: Life, source: random.Random) -> str:
    flush_until_empty(life)
    tags = source.choice([{}, {"tags": ["kv_cache"]}])
    told = everywhere(life, "/release_memory_occupation", tags, 200)
    if source.random() < 0.5:
        told += f", purge {purge_tenant(life, source)}"
    return f"{told}, resumed {everywhere(life, '/resume_memory_occupation', tags, 200)}"


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
    "forget": (2, forget, forgets),
    "erasure that is looked for": (2, erase_and_look, shares),
    "flush": (2, flush, always),
    "clear of the storage backend": (0.5, clear_storage_backend, always),
    "checkpoint": (2, checkpoint, always),
    "hint": (3, hint, always),
    "look around": (1, look_around, always),
    "abort of everything": (0.5, abort_everything, always),
    "pause": (1.5, pause, always),
    "update of weights": (1, update_weights, alone),
    "update of weights while paused": (0.7, update_weights_of_paused, alone),
    "release of memory": (0.7, release_and_resume, always),
    "release of memory while paused": (0.5, release_paused_and_resume, alone),
}
"""By name: how often, what is done, and where it can be."""
