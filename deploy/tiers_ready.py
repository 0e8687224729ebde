"""Says whether a server takes requests and its tiers are open: the readiness probe of the images.

    python tiers_ready.py [http://127.0.0.1:30000]

Exit code 0: SGLang answers requests, and the tiers below host memory find and store pages. 1: not
yet, or the server is about to end; one sentence says which. 2: the address cannot be used.

SGLang's ``/health`` and ``/ready`` are 200 once the model is loaded and its first request was
answered. The tier directory is open by then, but weights may still be read to identify them, and
until that is done nothing is loaded from NVMe and nothing is stored. ``GET /tier/costs`` says when:
each scheduler's record names the ``namespace`` of its pages from then on. A disk or bucket that
fails later takes no server out of service, nor do tiers that an operator detaches: that costs hits,
and an alert says so.

Uses the standard library alone and starts in a moment, since it runs every few seconds. A server
with ``--api-key`` or ``--admin-api-key`` asks it for that key, in ``SGLANG_TIERED_PROBE_KEY``.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

DEFAULT_URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "SGLANG_TIERED_PROBE_KEY"
TIMEOUT_S = 4.0

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks the server itself: a container's ``http_proxy`` is for the hub, and must not see the key."""


def main(arguments: list[str]) -> int:
    """Look once. Returns the exit code."""
    url = (arguments or [DEFAULT_URL])[0].rstrip("/")
    if len(arguments) > 1 or not url.startswith(("http://", "https://")):
        print(f"tiers_ready: {' '.join(arguments)} is no address; pass http://HOST:PORT.")
        return 2
    problem = why_not_ready(url)
    if problem:
        print(f"tiers_ready: {problem}")
    return 1 if problem else 0


def why_not_ready(url: str) -> str:
    """Return one sentence; empty if the server is ready."""
    status, _ = ask(f"{url}/ready")
    if status is None:
        return "nothing answers yet."
    if status == 404 and ask(f"{url}/health")[0] == 200:
        return ""  # of a server over several machines: the first one tells of the tiers
    if status != 200:
        return f"the server is starting, paused or ending (/ready answers {status})."
    status, body = ask(f"{url}/tier/costs")
    if status == 404:
        return ""  # without an NVMe tier, or with a pipeline: nothing to wait for that it tells
    if status in (401, 403):
        return f"/tier/costs asks for a key; set {KEY_VARIABLE}."
    if status != 200:
        return f"no scheduler has told of its tiers yet (/tier/costs answers {status})."
    costs = json.loads(body)
    if costs["draining"]:
        return "the server is about to end."
    ranks = costs["ranks"]
    opening = [rank for rank in ranks if not rank["namespace"] and rank.get("attached", True)]
    # Of a server over several machines, those that are beside its endpoint tell.
    missing = (costs.get("num_local_ranks") or costs["num_ranks"]) - len(ranks)
    if opening or missing:
        return f"the tiers of {len(opening) + missing} replicas are opening: weights are read."
    return ""


def ask(url: str) -> tuple[int | None, bytes]:
    """Return status and body; no status where nothing answers in time."""
    key = os.environ.get(KEY_VARIABLE)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with DIRECT.open(request, timeout=TIMEOUT_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except (OSError, HTTPException):
        return None, b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
