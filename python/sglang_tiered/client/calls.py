"""The calls of ``sglang_tiered.api`` as methods, each of which makes one ``Request``.

``SyncCalls`` and ``AsyncCalls`` differ in how a request is sent: ``TierClient`` and
``AsyncTierClient`` send it to a server over HTTP, ``Engine`` to its own schedulers.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import ssl
import time
from contextlib import contextmanager
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

import httpx
import msgspec

from sglang_tiered import api
from sglang_tiered.client.generation import PATH, RESUME_S, SILENCE_S, Answer, BrokenStreamError
from sglang_tiered.errors import RequestError
from sglang_tiered.loopback import is_loopback_url

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Coroutine,
        Iterator,
        Mapping,
        Sequence,
    )

    from sglang_tiered.client.generation import Generated
    from sglang_tiered.policy.server_costs import ServerCosts


_FAILURES = (
    *(httpx.HTTPError, httpx.InvalidURL, ImportError, RuntimeError, TypeError, ValueError),
    BrokenStreamError,
)
"""What httpx raises: ``ImportError`` for a proxy that it lacks a package for, the three after it
for what cannot be sent, and once it is closed. The last is ours."""

TIMEOUT_S = 45.0
"""More than the 30 s that a server works on one call."""

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


# ---- Over HTTP ----


class TierClient(SyncCalls):
    """Talks to one server. Any thread; ``close`` it, or use it in a ``with`` statement."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._http = _opened(httpx.Client, url, api_key, timeout_s)

    def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        try:
            response = self._http.request(**_parts(request))
        except _FAILURES as error:
            raise _unsent(self._http, request.call.path, error) from error
        return response.status_code, _json(response), str(self._http.base_url)

    def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        resume_s: float = RESUME_S,
        silence_s: float = SILENCE_S,
        is_seeded: bool = False,
    ) -> Iterator[Generated]:
        """Iterate over the tokens of an answer as they come. Where the server dies, drains, sheds
        or is silent for ``silence_s``, the next request asks for the rest, until ``resume_s`` after
        the break. ``is_seeded``: the servers draw by ``sampling_seed``. ``docs/conversations.md``
        says which parameters that suits."""
        answer = Answer(input_ids, sampling_params, is_seeded=is_seeded, resume_s=resume_s)
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_s)
        while not answer.has_ended:
            time.sleep(answer.wait_s)
            with (
                _resuming(self._http, answer),
                self._http.stream("POST", PATH, json=answer.body(), timeout=timeout) as response,
            ):
                if response.status_code != 200:
                    answer.refuse(response.status_code, response.headers, response.read())
                for data in response.iter_bytes():
                    yield from answer.read(data)
                    if answer.has_ended:
                        return

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTierClient(AsyncCalls):
    """Talks to one server from an event loop; ``aclose`` it, or use it in ``async with``."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._http = _opened(httpx.AsyncClient, url, api_key, timeout_s)

    async def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        try:
            response = await self._http.request(**_parts(request))
        except _FAILURES as error:
            raise _unsent(self._http, request.call.path, error) from error
        return response.status_code, _json(response), str(self._http.base_url)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        *,
        resume_s: float = RESUME_S,
        silence_s: float = SILENCE_S,
        is_seeded: bool = False,
    ) -> AsyncIterator[Generated]:
        """As ``TierClient.generate``."""
        answer = Answer(input_ids, sampling_params, is_seeded=is_seeded, resume_s=resume_s)
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_s)
        while not answer.has_ended:
            await asyncio.sleep(answer.wait_s)
            with _resuming(self._http, answer):
                stream = self._http.stream("POST", PATH, json=answer.body(), timeout=timeout)
                async with stream as response:
                    if response.status_code != 200:
                        body = await response.aread()
                        answer.refuse(response.status_code, response.headers, body)
                    async for data in response.aiter_bytes():
                        for piece in answer.read(data):
                            yield piece
                        if answer.has_ended:
                            return

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _opened(kind: Callable[..., T], url: str, api_key: str | None, timeout_s: float) -> T:
    """Return a client of httpx of that kind. Raises ``RequestError``."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise RequestError(f"{url!r} is not the URL of a server; write http://HOST:PORT")
    if api_key and (api_key != api_key.strip() or not api_key.isprintable()):
        raise RequestError("api_key holds more than a key, perhaps a line's end; pass it alone")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    settings: dict[str, Any] = {"headers": headers, "timeout": timeout_s}
    settings["limits"] = httpx.Limits(max_connections=None)  # or answers wait for each other's
    if is_loopback_url(url):
        # Without what the environment says of proxies; OpenSSL reads its own variables.
        settings |= {"trust_env": False, "verify": ssl.create_default_context()}
    try:
        return kind(base_url=url.rstrip("/"), **settings)
    except _FAILURES as error:
        why = f"no client for {url} with these settings ({_why(error)}); mend them"
        raise RequestError(why) from error


def _parts(request: Request[Any]) -> dict[str, Any]:
    call, given = request.call, request.given()
    sent = {"params": given} if call.method == "GET" else {"json": given}
    return {"method": call.method, "url": call.path, **sent}


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _unsent(http: httpx.Client | httpx.AsyncClient, path: str, error: Exception) -> RequestError:
    url = http.base_url
    if http.is_closed:
        return RequestError(f"this client of {url} is closed; make another")
    if not isinstance(error, httpx.HTTPError):
        return RequestError(f"{path} cannot be sent ({_why(error)}); mend what it holds")
    if isinstance(error, httpx.TimeoutException):
        return RequestError(f"{url} did not answer in time; ask again, or pass a longer timeout_s")
    return RequestError(
        f"{url} cannot be reached ({_why(error)}); start that server, or pass its URL"
    )


@contextmanager
def _resuming(http: httpx.Client | httpx.AsyncClient, answer: Answer) -> Iterator[None]:
    """Have an answer go on with another stream where one breaks within. Raises ``RequestError``."""
    try:
        yield
        if not answer.has_ended:
            raise BrokenStreamError("it ended before the answer did")
    except _FAILURES as error:
        if not _is_break(error, answer):
            raise _unsent(http, PATH, error) from error
        answer.resume(error, _why(error))


def _is_break(error: Exception, answer: Answer) -> bool:
    """Return whether another stream may bring the rest. A server that was never there is none."""
    if isinstance(error, httpx.ConnectError):
        return answer.was_begun
    return isinstance(error, (httpx.TransportError, BrokenStreamError))


def _why(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
