"""A gateway asks the picker in Envoy's protocol, with the body streamed through it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from route_front import BIG, CHAT, Front
from route_mocks import Mocks

from kit.waiting import eventually
from sglang_tiered.route.envoy import CLUSTERS, configuration, program_of
from sglang_tiered.route.settings import RouteConfig

pytest.importorskip("envoy")
pytestmark = pytest.mark.timeout(120)

SUBSET = "x-gateway-destination-endpoint-subset"


def gateway_of(front: Front, members: Path) -> dict[str, Any]:
    """One listener that streams bodies and does not go on without the picker, as gateways are.
    Trusts its clients' subset, so that a test may say one."""
    config = RouteConfig(servers="-", port=front.port, pick_s=5.0)
    made = configuration(config, members, members)
    _, inner = made["static_resources"]["listeners"]
    inner["address"] = {"socket_address": {"address": "127.0.0.1", "port_value": front.port}}
    del inner["internal_listener"], made["bootstrap_extensions"]
    clusters = made["static_resources"]["clusters"]
    made["static_resources"] = {
        "listeners": [inner],
        "clusters": [one for one in clusters if one["name"] != "picked"],
    }
    manager = inner["filter_chains"][0]["filters"][0]["typed_config"]
    asks = manager["http_filters"][0]["typed_config"]
    asks["processing_mode"]["request_body_mode"] = "FULL_DUPLEX_STREAMED"
    asks["processing_mode"]["request_trailer_mode"] = "SEND"
    asks["failure_mode_allow"] = False
    return made


@pytest.fixture(scope="module")
def running(mocks: Mocks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("gateway")
    members = folder / "members"
    members.mkdir()
    with Front.before(mocks, folder, "--envoy", "off", "--members", str(members)) as front:
        assert {path.stem for path in members.glob("*.json")} == set(CLUSTERS)
        path = folder / "envoy.json"
        path.write_text(json.dumps(gateway_of(front, members)))
        program = program_of(RouteConfig(servers="-"))
        command = [program, "-c", str(path), "-l", "error", "--use-dynamic-base-id"]
        with (folder / "envoy.log").open("wb") as log:
            envoy = subprocess.Popen([*command, "--concurrency", "1"], stdout=log, stderr=log)
        try:
            front.is_alone = False
            front.wait_until_ready(3)
            yield front
        finally:
            envoy.terminate()
            envoy.wait(20)


@pytest.fixture
def front(running: Front, mocks: Mocks) -> Front:
    return running.well(mocks)


def test_streamed_body_goes_to_the_pick_whole(front: Front, mocks: Mocks) -> None:
    for wanted in mocks.all:
        answer = front.ask(CHAT, BIG, {SUBSET: wanted.address})
        assert (answer.status, answer.served_by) == (200, wanted.address)
        assert wanted.seen[-1]["length"] == len(BIG)
        assert SUBSET not in wanted.seen[-1]["headers"]
        assert answer.headers["x-gateway-destination-endpoint-served"] == wanted.address
    assert front.ask("/v1/models").status == 200


def test_body_beyond_the_bound_is_passed_on(front: Front, mocks: Mocks) -> None:
    """The picker keeps 16 MiB of it at most, and picks by the length before it ends."""
    part, picks = b" " * (12 << 20), "sglang_tiered_route_picks_total"
    before = front.metric(picks)
    with front.connected() as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", str(3 * len(part)))
        connection.putheader(SUBSET, mocks[2].address)
        connection.endheaders()
        connection.send(part)
        connection.send(part)
        eventually(lambda: front.metric(picks) > before, "a pick")
        connection.send(part)
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("x-served-by")) == (200, mocks[2].address)
        answer.read()
    assert mocks[2].seen[-1]["length"] == 3 * len(part)


def test_no_server_of_a_subset_is_a_503(front: Front, mocks: Mocks) -> None:
    answer = front.chat(**{SUBSET: "127.0.0.1:1"})
    assert answer.status == 503 and json.loads(answer.body)["error"]["code"] == 503
