"""Which requests belong to one conversation, where the trace does not say.

A request follows the latest one that holds the last of the blocks they share, when they share at
least ``MIN_SHARED_BLOCKS`` from the start: fewer are a system prompt. Its turn is one more than
that one's. This is an inference: two people who ask about the same long document look like one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang_tiered_lab.trace.reuse import PrefixKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_tiered_lab.trace.request import TraceRequest


MIN_SHARED_BLOCKS = 3


def parents(requests: Sequence[TraceRequest]) -> list[int]:
    """The index of the request that each one follows, or -1. In order of arrival."""
    prefixes = PrefixKeys()
    latest: dict[int, int] = {}
    found = []
    for index, request in enumerate(requests):
        keys = prefixes.of(request.block_ids)
        shared = 0
        while shared < len(keys) and keys[shared] in latest:
            shared += 1
        found.append(latest[keys[shared - 1]] if shared >= MIN_SHARED_BLOCKS else -1)
        latest.update(dict.fromkeys(keys, index))
    return found


def with_sessions(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The requests, each with a conversation and a turn: the trace's own where every request has a
    conversation, inferred otherwise."""
    if all(request.conversation is not None for request in requests):
        return _with_turns(requests)
    turns: list[int] = []
    roots: list[int] = []
    for index, parent in enumerate(parents(requests)):
        turns.append(1 if parent < 0 else turns[parent] + 1)
        roots.append(index if parent < 0 else roots[parent])
    return [
        msgspec.structs.replace(request, conversation=f"inferred-{root}", turn=turn)
        for request, root, turn in zip(requests, roots, turns, strict=True)
    ]


def _with_turns(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    seen: dict[str | None, int] = {}
    numbered = []
    for request in requests:
        turn = request.turn or seen.get(request.conversation, 0) + 1
        seen[request.conversation] = turn
        numbered.append(msgspec.structs.replace(request, turn=turn))
    return numbered
