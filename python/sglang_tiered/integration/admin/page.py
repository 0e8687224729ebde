"""``TierPage``: ``GET /tier/``, a page for people, in front of SGLang's application.

The page is the same file for everybody and holds nothing of a server, so it needs no key. All that
it shows comes from the calls of ``http_api``, whose key the reader types in; the page keeps it in
its tab and sends it as every client does. A browser never sends it by itself, so no other site can
act with it.
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


def add_page(app: Any) -> None:
    """Put the page in front of ``app``, SGLang's FastAPI application, and of the keys that SGLang
    asks every path for. Call it once, before the server listens."""
    build = app.build_middleware_stack
    app.build_middleware_stack = lambda: TierPage(build())


class TierPage:
    """Answers ``GET`` and ``HEAD`` of ``PATH``, and passes everything else on to ``app``."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if path != PATH or scope.get("method") not in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body, headers = _page()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        shown = body if scope["method"] == "GET" else b""
        await send({"type": "http.response.body", "body": shown})


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
        "content-length": str(len(body)),
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
