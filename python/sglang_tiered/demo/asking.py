"""One client of one server: what it asks, how soon the answer began, and where the prompt was.

A prompt is the project's own glossary behind a number of its own, so that no two share a first
page, and a question whose answer stands there.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import time
import urllib.request
import uuid
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from sglang_tiered.client.http import TierClient
from sglang_tiered.demo.server import NotServingError
from sglang_tiered.errors import ConfigError
from sglang_tiered.loopback import opener_for

if TYPE_CHECKING:
    from collections.abc import Iterator


NUM_NEW = 12
"""Tokens of an answer: enough to say something, few enough to be quick."""
# Those that the trained demo model answers out of the text, with the row among the last ones: it is
# small.
ASKED = ("admission", "credit", "extent", "hit, miss", "namespace")

_DEADLINE_S = 300.0
_FAILURES = (OSError, ValueError, LookupError, TypeError, AttributeError, http.client.HTTPException)


@dataclass(frozen=True)
class AskedServer:
    """What the demo must know of a server; sizes in tokens."""

    model: str
    device_tokens: int
    host_tokens: int
    page_size: int
    has_nvme: bool


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    output_ids: list[int]
    tokens: dict[str, int]  # of the prompt, by where they came from
    text: str


def glossary() -> dict[str, str]:
    """Meanings by word."""
    page = resources.files(__package__ or "").joinpath("glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    return {word: re.sub(r"[`*]", "", meaning) for word, meaning in rows if word != "word"}


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except _FAILURES as error:
        raise NotServingError(f"the server broke off a request ({error})") from error


class Client:
    def __init__(self, url: str) -> None:
        """Raises ``ConfigError`` where the demo cannot run."""
        self._url = url.rstrip("/")
        # Keeps the demo's pages apart from everybody else's, and from its own last run's.
        self._salt = f"sglang-tiered-demo-{uuid.uuid4()}"
        try:
            self._opener = opener_for(url)  # once: making one may read certificates
            with self._open("/server_info") as response:
                info = json.load(response)
            states = [state.get("sglang_tiered", {}) for state in info["internal_states"]]
            pools = [int(info[name]) for name in ("max_total_num_tokens", "page_size")]
            tiers = states[0].get("tiers") if len(states) == 1 else None
        except _FAILURES as error:
            raise ConfigError(
                f"no SGLang server answers the demo at {url} ({error}); pass http://HOST:PORT of "
                "one that is up and wants no key"
            ) from error
        if tiers is None:
            raise ConfigError(
                f"{url} has no tiers, or several replicas, where a prompt may return to another; "
                "start a server with scripts/serve"
            )
        host_tokens = int(tiers["host"]["capacity_tokens"])
        name = str(info.get("served_model_name"))
        self.target = AskedServer(name, pools[0], host_tokens, pools[1], "nvme" in tiers)

    def prompt(self, number: int, length: int) -> list[int]:
        """``length`` token ids. The row that is asked for is among the last ones."""
        word = ASKED[number % len(ASKED)]
        rows = {each: f"{each}: {meaning}." for each, meaning in glossary().items()}
        # In an order of its own, so that another prompt's pages would show in the answer.
        order = random.Random(number).sample([*rows.values()], len(rows))
        order.remove(rows[word])
        order.insert(-2, rows[word])
        head = self._tokenize(f"{number}. Glossary\n\n")
        text = self._tokenize("\n".join(order))
        tail = self._tokenize(f'\n\nQuestion: What does "{word}" mean?\nAnswer: {word}:')
        room = max(length - len(head) - len(tail), 0)
        text *= -(-room // len(text))
        return (head + text[len(text) - room :] + tail)[:length]

    @_answering()
    def ask(self, prompt: list[int]) -> Answer:
        """Greedy, streamed: the first chunk is the first token."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True},
            "cache_salt": self._salt,
            "stream": True,
        }
        text, output_ids, meta, ttft_s = "", list[int](), dict[str, Any](), 0.0
        started = time.perf_counter()
        with self._open("/generate", body) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                ttft_s = ttft_s or time.perf_counter() - started
                chunk = json.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    raise ValueError(chunk["error"])
                part, tokens, meta = chunk["text"], chunk["output_ids"], chunk["meta_info"]
                # All so far, or with --incremental-streaming-output what is new.
                is_new = len(tokens) < meta["completion_tokens"]
                text = text + part if is_new else part
                output_ids = output_ids + tokens if is_new else tokens
        if len(output_ids) != NUM_NEW:
            raise ValueError(f"{NUM_NEW} tokens were asked, {len(output_ids)} came")
        details = meta.get("cached_tokens_details") or {}
        names = {"device": "device", "host": "host", "nvme": "storage"}
        found = {tier: int(details.get(name) or 0) for tier, name in names.items()}
        found["computed"] = len(prompt) - sum(found.values())
        return Answer(ttft_s, output_ids, found, text)

    def wait_until_durable(self, prompt: list[int]) -> None:
        """Until every whole page of the prompt is on NVMe for good."""
        with TierClient(self._url) as client:
            where: Any = {"input_ids": prompt, "cache_salt": self._salt}
            client.checkpoint(tier="nvme", within_s=_DEADLINE_S, **where)

    @_answering()
    def _tokenize(self, text: str) -> list[int]:
        """The server's tokens of a text, without any that begin or end one."""
        body = {"model": "default", "prompt": text, "add_special_tokens": False}
        with self._open("/tokenize", body) as response:
            tokens = [int(token) for token in json.load(response)["tokens"]]
        if not tokens:
            raise ValueError("a text has no tokens")
        return tokens

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers)
        response: http.client.HTTPResponse = self._opener.open(request, timeout=_DEADLINE_S)
        return response
