"""``TierClient`` and ``AsyncTierClient``: the calls of one server over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import httpx

from sglang_tiered.client.calls import AsyncCalls, SyncCalls
from sglang_tiered.errors import RequestError

if TYPE_CHECKING:
    from sglang_tiered.client.calls import Request

__all__ = ["AsyncTierClient", "TierClient"]

TIMEOUT_S = 45.0
"""More than the 30 s that a server works on one call."""


class TierClient(SyncCalls):
    """Talks to one server. Any thread; ``close`` it, or use it in a ``with`` statement."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._http = httpx.Client(**_settings(url, api_key, timeout_s))

    def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        try:
            response = self._http.request(request.method, request.path, **_parts(request))
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
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
        self._http = httpx.AsyncClient(**_settings(url, api_key, timeout_s))

    async def exchange(self, request: Request[Any]) -> tuple[int, Any, str]:
        try:
            response = await self._http.request(request.method, request.path, **_parts(request))
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return response.status_code, _json(response), str(self._http.base_url)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _settings(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise RequestError(f"{url!r} is not the URL of a server; write http://HOST:PORT")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout_s}


def _parts(request: Request[Any]) -> dict[str, Any]:
    return {"params" if request.method == "GET" else "json": request.given()}


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _unreachable(url: httpx.URL, error: httpx.HTTPError) -> RequestError:
    if isinstance(error, httpx.TimeoutException):
        return RequestError(f"{url} did not answer in time; ask again, or pass a longer timeout_s")
    why = str(error).rstrip(".") or type(error).__name__
    return RequestError(f"{url} cannot be reached ({why}); start that server, or pass its URL")
