"""``TierPage``: ``GET /tier/``, a page for people, in front of SGLang's application.

The page is the same file for everybody and holds nothing of a server, so it needs no key. All that
it shows comes from the calls of ``http_api``, whose key the reader types in; the page keeps it in
its tab and sends it as every client does. A browser never sends it by itself, so no other site can
act with it. Where a server has no keys, a call that another site makes a browser send is refused.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Application = Callable[[Any, Any, Any], Awaitable[None]]

__all__ = ["PATH", "TierPage", "add_page"]

PATH = "/tier/"

_REFUSAL = (
    b'{"error":"a page of another site had a browser send this; start the server with --api-key"}'
)


def add_page(app: Any, *, has_key: bool) -> None:
    """Put the page in front of ``app``, SGLang's FastAPI application, and of the keys that SGLang
    asks every path for, if it ``has_key``. Call it once, before the server listens."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: TierPage(build(), has_key=has_key)


class TierPage:
    """Answers ``GET`` and ``HEAD`` of ``PATH``, and passes everything else on to ``app``. Without
    keys it refuses calls below ``PATH`` that come from another site."""

    def __init__(self, app: Application, *, has_key: bool) -> None:
        self._app, self._has_key = app, has_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        method = scope.get("method")
        if path == PATH and method in ("GET", "HEAD"):
            await _answer(send, 200, *_page(), is_shown=method == "GET")
        elif path.startswith(PATH) and not self._has_key and _is_of_another_site(scope):
            await _answer(send, 403, _REFUSAL, [(b"content-type", b"application/json")])
        else:
            await self._app(scope, receive, send)


async def _answer(
    send: Any,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]],
    *,
    is_shown: bool = True,
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body if is_shown else b""})


def _is_of_another_site(scope: Any) -> bool:
    """Whether another site's page has a browser send this. Such a page may send a ``POST`` of text
    to any server that the browser reaches. SGLang lets it add headers and read every answer."""
    headers = dict(scope["headers"])
    if site := headers.get(b"sec-fetch-site"):  # which browsers tell this machine and over TLS
        return site in (b"cross-site", b"same-site")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


@functools.cache
def _page() -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the page and its headers. Read when somebody first looks."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest('script', text)}",
            f"style-src {_digest('style', text)}",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    body = text.encode()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    return body, [(name.encode(), value.encode()) for name, value in headers.items()]


def _digest(element: str, text: str) -> str:
    """Return the only content of an element that a browser may run, by its digest."""
    (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
