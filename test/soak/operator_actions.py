"""What an operator does to servers under load, one thing after the other, drawn at random."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

from conversations import TENANTS
from life import Life, Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefill_decode import Reply

__all__ = ["Operator"]

MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 1.5

Action = "Callable[[Life, random.Random], str]"


class Operator(threading.Thread):
    """Does one thing after the other until the round ends."""

    def __init__(self, life: Life, seed: str) -> None:
        super().__init__(name=f"operator-{seed}", daemon=True)
        self._life, self._source = life, random.Random(seed)

    def run(self) -> None:
        life, source = self._life, self._source
        try:
            while not life.ends.wait(source.uniform(MIN_PAUSE_S, MAX_PAUSE_S)):
                names = [name for name, action in ACTIONS.items() if action[2](life)]
                weights = [ACTIONS[name][0] for name in names]
                name = source.choices(names, weights)[0]
                life.record.did(f"{name} ...")
                outcome = ACTIONS[name][1](life, source)
                life.record.did(f"{name}: {outcome}")
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


def purge_tenant(life: Life, source: random.Random) -> str:
    tenant = source.randrange(len(TENANTS))
    return _purge(life, [tenant], TENANTS[tenant])


def purge_everything(life: Life, source: random.Random) -> str:
    return _purge(life, list(range(len(TENANTS))), {"all": True})


def _purge(life: Life, tenants: list[int], whom: dict[str, Any]) -> str:
    began = {tenant: life.asked.purge_begins(tenant) for tenant in tenants}
    told = everywhere(life, "/tier/purge", whom, 200, 503)
    if "503" not in told:
        for tenant in tenants:
            life.asked.purged(tenant, began[tenant])
    return told


def flush(life: Life, source: random.Random) -> str:
    return everywhere(life, "/flush_cache", {}, 200, 400)


def always(life: Life) -> bool:
    return True


ACTIONS: dict[str, tuple[float, Any, Callable[[Life], bool]]] = {
    "purge of a tenant": (2, purge_tenant, always),
    "purge of everything": (0.5, purge_everything, always),
    "flush": (3, flush, always),
}
"""By name: how often, what is done, and where it can be."""
