"""``TierClient`` and ``AsyncTierClient``: the calls of one server over HTTP."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Any, Self

import httpx

from sglang_tiered.client.calls import AsyncCalls, SyncCalls
from sglang_tiered.errors import RequestError
from sglang_tiered.loopback import is_loopback_url

if TYPE_CHECKING:
    from sglang_tiered.client.calls import Request

__all__ = ["AsyncTierClient", "TierClient"]

_FAILURES = (httpx.HTTPError, httpx.InvalidURL, ImportError, RuntimeError, TypeError, ValueError)
"""What httpx raises: ``ImportError`` for a proxy that it lacks a package for, the last three for
what cannot be sent, and once it is closed."""

TIMEOUT_S = 45.0
"""More than the 30 s that a server works on one call."""


class TierClient(SyncCalls):
    """Talks to one server. Any thread; ``close`` it, or use it in a ``with`` statement."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        try:
            self._http = httpx.Client(**_settings(url, api_key, timeout_s))
        except _FAILURES as error:
            raise _unusable(url, error) from error

    def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        try:
            response = self._http.request(request.method, request.path, **_parts(request))
        except _FAILURES as error:
            raise _unsent(self._http, request, error) from error
        return response.status_code, _json(response), str(self._http.base_url)

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
        try:
            self._http = httpx.AsyncClient(**_settings(url, api_key, timeout_s))
        except _FAILURES as error:
            raise _unusable(url, error) from error

    async def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        try:
            response = await self._http.request(request.method, request.path, **_parts(request))
        except _FAILURES as error:
            raise _unsent(self._http, request, error) from error
        return response.status_code, _json(response), str(self._http.base_url)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _settings(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise RequestError(f"{url!r} is not the URL of a server; write http://HOST:PORT")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    settings = {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout_s}
    if is_loopback_url(url):
        # Without what the environment says of proxies; OpenSSL reads its own variables.
        settings |= {"trust_env": False, "verify": ssl.create_default_context()}
    return settings


def _parts(request: Request[Any]) -> dict[str, Any]:
    return {"params" if request.method == "GET" else "json": request.given()}


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _unusable(url: str, error: Exception) -> RequestError:
    return RequestError(f"no client for {url} with these settings ({_why(error)}); mend them")


def _unsent(
    http: httpx.Client | httpx.AsyncClient, request: Request[Any], error: Exception
) -> RequestError:
    url = http.base_url
    if http.is_closed:
        return RequestError(f"this client of {url} is closed; make another")
    if not isinstance(error, httpx.HTTPError):
        return RequestError(f"{request.path} cannot be sent ({_why(error)}); mend what it holds")
    if isinstance(error, httpx.TimeoutException):
        return RequestError(f"{url} did not answer in time; ask again, or pass a longer timeout_s")
    return RequestError(
        f"{url} cannot be reached ({_why(error)}); start that server, or pass its URL"
    )


def _why(error: Exception) -> str:
    return str(error).rstrip(".") or type(error).__name__
