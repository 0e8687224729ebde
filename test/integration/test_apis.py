"""SGLang's endpoints through our launcher: salts separate tenants, clients see tiers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from conftest import SMALL, Launch
from server_process import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Server:
    directory = tmp_path_factory.mktemp("tier") / "kv"
    return launch(*SMALL, "--tier-dir", str(directory), "--served-model-name", "demo")


LONG = "Late in the year the river rose, and the ferry lay idle under the willows. " * 12
MESSAGES = [{"role": "user", "content": LONG}]
BODIES = {
    "/v1/messages": {"model": "demo", "max_tokens": 4, "messages": MESSAGES},
    "/api/chat": {"model": "demo", "messages": MESSAGES, "options": {"num_predict": 4}},
    "/api/generate": {"model": "demo", "prompt": LONG, "options": {"num_predict": 4}},
    "/v1/chat/completions": {"model": "demo", "max_tokens": 4, "messages": MESSAGES},
    "/v1/completions": {"model": "demo", "max_tokens": 4, "prompt": LONG},
    "/v1/responses": {"model": "demo", "max_output_tokens": 4, "input": LONG},
    "/generate": {"text": LONG, "sampling_params": {"max_new_tokens": 4}},
}


def post(server: Server, path: str, body: object) -> tuple[int, str]:
    """A stream is no JSON."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["session_id", "conversation_id"])
def test_salt_separates_tenants_on_every_endpoint(
    server: Server, path: str, stream: bool, name: str
) -> None:
    """A conversation is found by its tenant alone, where the endpoint knew both."""
    conversation = f"{path}-{name}-{stream}"
    salted = {"cache_salt": "s3cret", "extra_key": "acme"}
    status, text = post(
        server, path, {**BODIES[path], "stream": stream, name: conversation, **salted}
    )
    assert status == 200, text
    selector = {"conversation_id": conversation}
    status, text = post(server, "/tier/residency", {**selector, **salted})
    assert status == 200, text
    assert json.loads(text)["device"] >= 128
    assert post(server, "/tier/residency", selector)[0] == 404
    assert post(server, "/tier/residency", {**selector, "cache_salt": "s3cret"})[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "demo", "input": LONG}),
        ("/v1/rerank", {"query": "river", "documents": [LONG]}),
        ("/encode", {"text": LONG}),
        ("/classify", {"text": LONG}),
        ("/vertex_generate", {"instances": [{"text": LONG, "cache_salt": "s3cret"}]}),
    ],
)
def test_salt_that_an_endpoint_cannot_keep_is_refused(
    server: Server, path: str, body: dict[str, object]
) -> None:
    status, text = post(server, path, {**body, "cache_salt": "s3cret"})
    assert status == 400, text
    assert "cache_salt" in text


def test_openai_clients_see_cached_tokens_by_tier(server: Server) -> None:
    path = "/v1/chat/completions"
    body = {**BODIES[path], "temperature": 0, "return_cached_tokens_details": True}
    server.request(path, body)
    again = server.request(path, body)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 64
    tiers = again["sglext"]["cached_tokens_details"]
    assert tiers["device"] + tiers["host"] + tiers.get("storage", 0) == cached
