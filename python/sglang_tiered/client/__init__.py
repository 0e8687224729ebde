"""The tiers of a server for Python programs: ``TierClient`` and ``AsyncTierClient``.

    with TierClient("http://127.0.0.1:30000") as client:
        client.pin(rid=rid, name="anna", ttl=86_400, within_s=60)
        for conversation in client.conversations():
            print(conversation.id, conversation.num_tokens)

A prefix is named by exactly one of ``rid``, ``conversation_id``, ``text`` and ``input_ids``.
Whatever goes wrong raises ``RequestError``. A call that waits for durable pages repeats its
question for ``within_s`` seconds while the answer is 503. ``generate`` goes on with an answer whose
server died. Imports neither torch nor SGLang.
"""

from __future__ import annotations

from sglang_tiered.api import (
    Checkpoint,
    Conversation,
    ConversationPage,
    ConversationPin,
    Forgotten,
    Pin,
    Prefetch,
    Purge,
    Residency,
    TenantUsage,
    Unpinned,
)
from sglang_tiered.client.calls import AsyncTierClient, TierClient
from sglang_tiered.client.generation import Generated
from sglang_tiered.errors import RequestError

__all__ = [
    "AsyncTierClient",
    "Checkpoint",
    "Conversation",
    "ConversationPage",
    "ConversationPin",
    "Forgotten",
    "Generated",
    "Pin",
    "Prefetch",
    "Purge",
    "RequestError",
    "Residency",
    "TenantUsage",
    "TierClient",
    "Unpinned",
]
