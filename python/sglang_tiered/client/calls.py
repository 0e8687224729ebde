"""The calls of ``sglang_tiered.api`` as methods, each of which makes one ``Request``.

``SyncCalls`` and ``AsyncCalls`` differ in how a request is sent; the clients of ``http`` send it to
a server, ``Engine`` to its own schedulers.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import time
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import msgspec

from sglang_tiered import api
from sglang_tiered.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence

    from sglang_tiered.policy.server_costs import ServerCosts


AGAIN_S = 0.25

P = ParamSpec("P")
T = TypeVar("T")


class Tenant(TypedDict, total=False):
    """Whose pages: the keys that the requests carried. Both are left out where those had none."""

    extra_key: str | None
    cache_salt: str | None


class Selector(Tenant, total=False):
    """Names one prefix: exactly one of the four. With the keys of another tenant a ``rid`` is not
    known; without keys any is."""

    rid: str | None
    conversation_id: str | None
    text: str | None
    input_ids: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One call, and what to send. ``body`` is the query of a ``GET``."""

    call: type[api.Call]
    body: dict[str, Any] = field(default_factory=dict)
    within_s: float = 0.0

    def given(self) -> dict[str, Any]:
        """Return the body without what was left out, and tokens of any sequence as a list. Raises
        ``RequestError``."""
        given = {name: value for name, value in self.body.items() if value is not None}
        if "input_ids" in given:
            try:
                given["input_ids"] = [operator.index(token) for token in given["input_ids"]]
            except TypeError as error:
                raise RequestError("input_ids must be a sequence of token numbers") from error
        return given

    def result(self, status: int, answer: Any, whose: str) -> T:
        """Return the answer as its type. Raises ``RequestError`` for any other; ``whose`` names
        the server."""
        where = f"{self.call.method} {whose}{self.call.path}"
        if status in (200, 202):
            try:
                found: T = msgspec.convert(answer, self.call.answer)
                return found
            except msgspec.ValidationError as error:
                raise RequestError(
                    f"{where} answered what this client does not know ({error}); use a client and "
                    "a server of one version",
                    status,
                ) from error
        report = answer if isinstance(answer, dict) else {}
        if status in (401, 403):
            sentence = f"{where} takes no call with this key; pass --admin-api-key, else --api-key"
        elif isinstance(report.get("error"), str):
            sentence = report["error"]
        elif status == 503 and report:
            known = ", ".join(f"{name} {value}" for name, value in report.items())
            sentence = f"not durable yet ({known}); ask again, or for longer with within_s"
        else:
            sentence = f"{where} answered {status}; is it a server of sglang-tiered?"
        raise RequestError(sentence, status, report)


class _Call(Generic[P, T]):
    """Makes a method that sends the request which the decorated one returns."""

    def __init__(self, build: Callable[Concatenate[Any, P], Request[T]]) -> None:
        self._build = build
        self.__doc__ = build.__doc__

    @overload
    def __get__(self, calls: SyncCalls, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, calls: AsyncCalls, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, calls: None, owner: type) -> Self: ...
    def __get__(self, calls: Any, owner: type) -> Any:
        if calls is None:
            return self

        @functools.wraps(self._build)
        def call(*arguments: P.args, **named: P.kwargs) -> Any:
            return calls.send(self._build(calls, *arguments, **named))

        return call


class _Calls:
    """Every call of the tiers. ``docs/conversations.md`` says what each does."""

    @_Call
    def checkpoint(
        self, *, tier: api.DurableTier | None = None, within_s: float = 0.0, **of: Unpack[Selector]
    ) -> Request[api.Checkpoint]:
        """Make a prefix durable: in the bucket where there is one, else on NVMe."""
        return Request(api.CheckpointCall, {**of, "tier": tier}, within_s)

    @_Call
    def residency(self, **of: Unpack[Selector]) -> Request[api.Residency]:
        """Ask which tiers hold a prefix."""
        return Request(api.ResidencyCall, {**of})

    @_Call
    def pin(
        self,
        *,
        name: str | None = None,
        ttl: float | None = None,
        tier: api.DurableTier | None = None,
        within_s: float = 0.0,
        **of: Unpack[Selector],
    ) -> Request[api.Pin]:
        """Keep a prefix in a tier (NVMe) for ``ttl`` seconds, or until it is unpinned. Refused with
        409 beyond the share of the tier that pins may take."""
        body = {**of, "name": name, "ttl": ttl, "tier": tier}
        return Request(api.PinCall, body, within_s)

    @_Call
    def unpin(
        self, *, name: str | None = None, within_s: float = 0.0, **of: Unpack[Selector]
    ) -> Request[api.Unpinned]:
        """Let a pin go in every tier: by its name and tenant, or by its prefix."""
        return Request(api.UnpinCall, {**of, "name": name}, within_s)

    @_Call
    def prefetch(
        self, *, wait_s: float | None = None, **of: Unpack[Selector]
    ) -> Request[api.Prefetch]:
        """Begin to load a prefix that is about to be used, and wait up to ``wait_s`` seconds (at
        most 30) for it. 503 if the load was withdrawn."""
        return Request(api.PrefetchCall, {**of, "wait_s": wait_s})

    @_Call
    def forget(
        self, *, keep_tokens: int | None = None, within_s: float = 0.0, **of: Unpack[Selector]
    ) -> Request[api.Forgotten]:
        """Remove what lies behind ``keep_tokens`` (0) of a prefix from every tier and server."""
        body = {**of, "keep_tokens": keep_tokens}
        return Request(api.ForgetCall, body, within_s)

    @_Call
    def conversation_page(
        self, *, limit: int | None = None, after: str | None = None, **tenant: Unpack[Tenant]
    ) -> Request[api.ConversationPage]:
        """List up to ``limit`` (100, at most 1,000) of a tenant's conversations."""
        body = {**tenant, "limit": limit, "after": after}
        return Request(api.ConversationsCall, body)

    @_Call
    def purge(self, *, within_s: float = 0.0, **tenant: Unpack[Tenant]) -> Request[api.Purge]:
        """Remove all pages of one tenant from every tier and server."""
        return Request(api.PurgeCall, {**tenant}, within_s)

    @_Call
    def purge_all(self, *, within_s: float = 0.0) -> Request[api.Purge]:
        """Remove all pages of every tenant from every tier and server."""
        return Request(api.PurgeCall, {"all": True}, within_s)

    @_Call
    def tenants(self, *, limit: int | None = None) -> Request[list[list[api.TenantUsage]]]:
        """List the tenants with most on NVMe, for each scheduler."""
        return Request(api.TenantsCall, {"limit": limit})

    @_Call
    def costs(self) -> Request[ServerCosts]:
        """Ask what computing and loading cost on this server, and how busy it is."""
        return Request(api.CostsCall)


class SyncCalls(_Calls):
    """The calls, each of which returns its answer."""

    def send(self, request: Request[T]) -> T:
        """Send a request until it has an answer, or ``within_s`` is over."""
        again_until = time.monotonic() + request.within_s
        while True:
            status, answer, whose = self.exchange(request)
            if status != 503 or time.monotonic() + AGAIN_S > again_until:
                return request.result(status, answer, whose)
            time.sleep(AGAIN_S)

    def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        """Return status and JSON of one answer, and whose it is."""
        raise NotImplementedError

    def conversations(self, **tenant: Unpack[Tenant]) -> Iterator[api.Conversation]:
        """Iterate over all conversations of a tenant, page by page."""
        page = self.conversation_page(**tenant)
        yield from page.conversations
        while page.next is not None:
            page = self.conversation_page(after=page.next, **tenant)
            yield from page.conversations


class AsyncCalls(_Calls):
    """The calls as coroutines."""

    async def send(self, request: Request[T]) -> T:
        """Send a request until it has an answer, or ``within_s`` is over."""
        again_until = time.monotonic() + request.within_s
        while True:
            status, answer, whose = await self.exchange(request)
            if status != 503 or time.monotonic() + AGAIN_S > again_until:
                return request.result(status, answer, whose)
            await asyncio.sleep(AGAIN_S)

    async def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        """Return status and JSON of one answer, and whose it is."""
        raise NotImplementedError

    async def conversations(self, **tenant: Unpack[Tenant]) -> AsyncIterator[api.Conversation]:
        """Iterate over all conversations of a tenant, page by page."""
        after: str | None = None
        while True:
            page = await self.conversation_page(after=after, **tenant)
            for conversation in page.conversations:
                yield conversation
            if (after := page.next) is None:
                return
