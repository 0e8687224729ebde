"""One client of one server: what it asks, how soon the answer began, and where the prompt was."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sglang_tiered.demo.plan import NUM_NEW, Pools
from sglang_tiered.errors import ConfigError
from sglang_tiered.loopback import opener_for

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TIERS", "TimedAnswer", "AskingError", "Client", "DemoTarget", "read_target"]

TIERS = ("device", "host", "nvme", "computed")
_DEADLINE_S = 300.0
_DURABLE_DEADLINE_S = 60.0
_FAILURES = (OSError, ValueError, KeyError, TypeError, http.client.HTTPException)


class AskingError(Exception):
    """A server stopped answering as it should. One sentence."""


@dataclass(frozen=True)
class DemoTarget:
    """What the demo must know of a server."""

    model: str
    pools: Pools


@dataclass(frozen=True)
class TimedAnswer:
    ttft_s: float
    output_ids: tuple[int, ...]
    tokens: dict[str, int]  # of the prompt, by where they came from
    text: str


def read_target(url: str) -> DemoTarget:
    """Raises ``ConfigError`` where the demo cannot run."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r} is no address of a server; pass http://HOST:PORT")
    try:
        with opener_for(url).open(f"{url}/server_info", timeout=30) as response:
            info = json.load(response)
    except urllib.error.HTTPError as error:
        why = (
            "asks for a key, which the demo has not" if error.code == 401 else "is no SGLang server"
        )
        raise ConfigError(f"what answers at {url} {why} (HTTP {error.code})") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"nothing answers at {url} ({reason}); is the server up?") from error
    except (ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"what answers at {url} is no SGLang server") from error
    try:
        states, page_size = info["internal_states"], int(info["page_size"])
        device_tokens = int(info["max_total_num_tokens"])
        model = str(info["served_model_name"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"what answers at {url} is no SGLang server") from error
    if len(states) != 1:
        raise ConfigError(
            f"{url} has {len(states)} replicas, and a prompt may return to another; the demo needs "
            "a server without data parallelism"
        )
    tiers = states[0].get("sglang_tiered", {}).get("tiers")
    if tiers is None:
        raise ConfigError(f"{url} is an SGLang server without tiers; start it with scripts/serve")
    pools = Pools(device_tokens, int(tiers["host"]["capacity_tokens"]), page_size, "nvme" in tiers)
    return DemoTarget(model, pools)


@dataclass(frozen=True)
class Client:
    """``salt`` keeps the demo's pages apart from everybody else's, and from its own last run's."""

    url: str
    salt: str

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        """Once: making one may read certificates, within a time to first token."""
        return opener_for(self.url)

    def tokenize(self, text: str) -> list[int]:
        """The server's tokens of a text, without any that begin or end one."""
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        try:
            with self._post("/tokenize", body) as response:
                tokens = [int(token) for token in json.load(response)["tokens"]]
            if not tokens:
                raise ValueError("it found no tokens")
            return tokens
        except _FAILURES as error:
            raise AskingError(f"the server did not tokenize a text ({error})") from error

    def ask(
        self, prompt: list[int], hear: Callable[[str], None] = lambda text: None
    ) -> TimedAnswer:
        """Greedy, streamed: the first chunk is the first token. ``hear`` gets the text so far."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True},
            "cache_salt": self.salt,
            "stream": True,
        }
        text, output_ids, last, ttft_s = "", list[int](), dict[str, Any](), 0.0
        started = time.perf_counter()
        try:
            with self._post("/generate", body) as response:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    ttft_s = ttft_s or time.perf_counter() - started
                    chunk = json.loads(line[len(b"data: ") :])
                    if "error" in chunk:
                        raise ValueError(chunk["error"])
                    part, tokens, last = (
                        chunk["text"] or "",
                        chunk["output_ids"],
                        chunk["meta_info"],
                    )
                    # All so far, or with --incremental-streaming-output what is new.
                    is_new = len(tokens) < last["completion_tokens"]
                    text = text + part if is_new else part
                    output_ids = output_ids + tokens if is_new else tokens
                    hear(text)
            if len(output_ids) != NUM_NEW:
                raise ValueError(f"{NUM_NEW} tokens were asked, {len(output_ids)} came")
            details = last.get("cached_tokens_details") or {}
            found = [int(details.get(tier) or 0) for tier in ("device", "host", "storage")]
            counts = (*found, len(prompt) - sum(found))
            return TimedAnswer(
                ttft_s, tuple(output_ids), dict(zip(TIERS, counts, strict=True)), text
            )
        except _FAILURES as error:
            raise AskingError(f"the server broke off a request ({error})") from error

    def wait_until_durable(self, prompt: list[int]) -> None:
        """Until every whole page of the prompt is on NVMe for good."""
        body = {"input_ids": prompt, "cache_salt": self.salt, "tier": "nvme"}
        deadline = time.monotonic() + _DURABLE_DEADLINE_S
        while True:
            try:
                with self._post("/tier/checkpoint", body):
                    return
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() >= deadline:
                    raise AskingError(
                        f"what was asked did not become durable on NVMe ({error})"
                    ) from error
                time.sleep(0.1)
            except _FAILURES as error:
                raise AskingError(f"the server broke off a request ({error})") from error

    def _post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        response: http.client.HTTPResponse = self._opener.open(request, timeout=_DEADLINE_S)
        return response
