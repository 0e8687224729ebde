"""``TierClient`` and ``AsyncTierClient``: the calls of one server over HTTP."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from sglang_tiered.client.calls import AsyncCalls, SyncCalls
from sglang_tiered.client.generation import PATH, RESUME_S, SILENCE_S, Answer, BrokenStreamError
from sglang_tiered.errors import RequestError
from sglang_tiered.loopback import is_loopback_url

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from sglang_tiered.client.calls import Request
    from sglang_tiered.client.generation import Generated


T = TypeVar("T")

_FAILURES = (
    *(httpx.HTTPError, httpx.InvalidURL, ImportError, RuntimeError, TypeError, ValueError),
    BrokenStreamError,
)
"""What httpx raises: ``ImportError`` for a proxy that it lacks a package for, the three after it
for what cannot be sent, and once it is closed. The last is ours."""

TIMEOUT_S = 45.0
"""More than the 30 s that a server works on one call."""


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
