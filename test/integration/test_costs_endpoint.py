"""``GET /tier/costs`` of a live server: true, protected, and answered while the scheduler hangs.
And ``GET /tier/``, the page for people, in a browser: what it shows of the same server, and does.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import PAGE, Launch, aligned, make_prompts
from kit.chromium import Browser, chromium
from kit.waiting import eventually
from server_process import Server
from sglang_tiered.policy.server_costs import (
    RankCosts,
    ServerCosts,
    costs_key,
    parse_server_costs,
    switch_key,
)

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 3, 1500
PROMPTS = make_prompts(101, NUM_PROMPTS, LENGTH)
LONG = make_prompts(102, 5, 3500)  # more behind the first than a batch takes
KEY = "admin-of-the-test"
ANSWER_S = 2.0
"""Many times what an answer takes, less than any of the hangs here."""


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Path:
    return demo_model


@pytest.fixture(scope="module")
def server(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tier") / "kv"
    with pytest.MonkeyPatch.context() as patch:
        opener = urllib.request.build_opener()
        opener.addheaders = [("Authorization", f"Bearer {KEY}")]
        patch.setattr(urllib.request, "_opener", opener)  # for whatever asks below
        yield launch(
            *("--max-total-tokens", "16384", "--tier-host-bytes", "96MiB"),
            *("--tier-dir", str(directory), "--admin-api-key", KEY),
            *("--tier-log-requests", str(directory.parent / "requests.jsonl")),
        )


def status(server: Server, path: str, key: str | None, body: Any = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    headers |= {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    try:
        with urllib.request.build_opener().open(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def costs(server: Server) -> ServerCosts:
    request = urllib.request.Request(
        server.url + "/tier/costs", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        assert response.headers["Content-Type"] == "application/json"
        return parse_server_costs(response.read())


def rank(server: Server) -> RankCosts:
    (record,) = costs(server).ranks
    return record


def schedulers(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "scheduler" in " ".join(child.cmdline())]


def test_costs_have_the_key_of_other_tier_endpoints(server: Server) -> None:
    for path in ("/tier/costs", "/tier/tenants"):
        assert [status(server, path, key) for key in (None, "wrong", KEY)] == [401, 401, 200]


def test_key_of_costs_opens_nothing_else(server: Server) -> None:
    paths = ("/tier/costs", "/tier/tenants", "/tier/requests", "/flush_cache")
    assert [status(server, path, costs_key(KEY)) for path in paths] == [200, 401, 401, 401]


def test_key_of_an_order_opens_it_alone(server: Server) -> None:
    """This server takes no role, and says so to whoever may ask."""
    boot, until_s = rank(server).boot, int(time.time()) + 600
    order = {"new_role": "decode", "decode_cuda_graph_memory_gb": 0}
    keys = [switch_key(KEY, one, "decode", until_s) for one in (boot, "00" * 16)]
    answers = [status(server, "/pd_role_switch", key, order) for key in (KEY, *keys, None)]
    assert answers == [400, 400, 401, 401]
    assert status(server, "/tier/costs", keys[0]) == 401


def test_routers_plan_is_what_the_server_does(server: Server) -> None:
    for prompt in PROMPTS:
        server.generate(prompt)
    server.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // PAGE))
    learnt = rank(server)
    assert learnt.prefill.observed >= NUM_PROMPTS
    assert learnt.tiers["nvme"].healthy and learnt.tiers["nvme"].held_bytes
    for prompt in PROMPTS:
        server.flush()
        held = server.request("/tier/residency", {"input_ids": prompt[:-1]})["nvme"]
        assert held == aligned(LENGTH)
        record = rank(server)
        plan = record.cost_model().plan(
            num_held=held, num_new=LENGTH, num_before=0, ahead=record.ahead_tokens
        )
        before = server.tier_state()
        server.generate(prompt)
        after = server.tier_state()
        loaded, declined = (
            after[f"load_decision_tokens:{name}"] - before[f"load_decision_tokens:{name}"]
            for name in ("load", "declined")
        )
        assert (loaded, declined) == (plan.num_tokens, held - plan.num_tokens)
    assert rank(server).boot == learnt.boot


def test_prefill_under_way_is_told(server: Server) -> None:
    server.flush()
    seen: list[RankCosts] = []
    first, *others = [threading.Thread(target=server.generate, args=(prompt,)) for prompt in LONG]
    deadline = time.monotonic() + 60.0

    def look_until(condition: Callable[[], bool]) -> None:
        while not condition():
            assert time.monotonic() < deadline
            seen.append(rank(server))

    first.start()
    # Of those that arrive together a batch takes what fits, and a record may be older than it.
    look_until(lambda: bool(seen) and seen[-1].running_prefill_s > 0.0 or not first.is_alive())
    for asker in others:
        asker.start()
    look_until(lambda: not any(asker.is_alive() for asker in (first, *others)))
    assert max(record.running_prefill_s for record in seen) > 0.1
    assert max(record.queue_wait_s for record in seen) > 0.1
    assert max(record.waiting.tokens for record in seen) > len(LONG[0]) / 2
    assert max(record.busy for record in seen) > 0.05
    eventually(lambda: rank(server).wait_s() == 0.0)


def test_hung_scheduler_is_answered_for_with_its_age(server: Server) -> None:
    (scheduler,) = schedulers(server)
    os.kill(scheduler.pid, signal.SIGSTOP)
    try:
        first = rank(server)
        eventually(lambda: rank(server).age_s > first.age_s + 1.5)
        assert rank(server).at == first.at
    finally:
        os.kill(scheduler.pid, signal.SIGCONT)
    eventually(lambda: rank(server).at > first.at and rank(server).age_s < 2.0)


# ---- The page ----

HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program, why_not = chromium()
    if program is None:
        pytest.skip(why_not)
    with Browser(program, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(server: Server, browser: Browser) -> Browser:
    """The page, with its key given after a wrong one."""
    server.generate(PROMPTS[0], conversation_id=HOSTILE, rid="hostile")
    server.generate(PROMPTS[1], rid="other", extra_key="acme")
    browser.go(server.url + "/tier/")
    for key in ("wrong", KEY):
        browser.wait_for("document.getElementById('entry')?.hidden === false")
        browser.errors.clear()  # the 401 that asks for it
        browser.ask(
            f"document.getElementById('key').value = {key!r};"
            "document.querySelector('#key-form button').click()"
        )
        if key == "wrong":
            browser.wait_for("!document.getElementById('refused').hidden")
            assert not browser.ask("document.querySelector('main').innerText.includes('NVMe')")
    browser.wait_for("!!document.querySelector('#conversations .name')")
    browser.errors.clear()
    return browser


def press(page: Browser, words: str) -> None:
    """A button of the hostile conversation, and what is said afterwards."""
    page.wait_for("[...document.querySelectorAll('#conversations button')].every(b=>!b.disabled)")
    rows = "[...document.querySelectorAll('#conversations > li')]"
    row = f"{rows}.find(r=>r.dataset.name==={HOSTILE!r})"
    page.wait_for(f"!!{row}")
    page.ask(f"[...{row}.querySelectorAll('button')].find(b=>b.textContent==={words!r}).click()")


def said(page: Browser, words: str) -> None:
    page.wait_for(f"document.getElementById('said').textContent.startsWith({words!r})")


def test_page_holds_nothing_without_the_key(server: Server) -> None:
    assert status(server, "/tier/", None) == 200
    assert [status(server, "/tier/requests", key) for key in (None, "wrong")] == [401, 401]
    with urllib.request.build_opener().open(server.url + "/tier/", timeout=60) as response:
        policy = response.headers["Content-Security-Policy"]
        text = response.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "acme" not in text and "hostile" not in text and "http" not in text


def test_page_shows_the_figures_of_the_calls(server: Server, page: Browser) -> None:
    answer = server.request("/tier/requests?limit=1000")
    record = rank(server)

    def shows_them() -> bool:
        held = page.ask("document.querySelector('[data-tier=nvme]').dataset.bytes")
        return int(held) == rank(server).tiers["nvme"].stored_bytes

    eventually(shows_them)
    assert f"{record.host.capacity_tokens:,}" in page.ask(
        "document.querySelector('[data-tier=host]').innerText"
    )
    newest = answer["requests"][0]
    assert newest["rid"] == "other" and newest["why"]
    shown = page.wait_for("document.querySelector('#requests > li').innerText")
    assert "other" in shown and newest["why"] in shown
    minute = answer["minute"]
    of_minute = answer["requests"][: minute["num_requests"]]
    assert len(of_minute) == minute["num_requests"] >= 2
    assert minute["num_computed"] == sum(each["tokens"]["num_computed"] for each in of_minute)


@pytest.mark.parametrize("is_dark", [False, True])
@pytest.mark.parametrize("width", [360, 1400])
def test_page_fits_and_can_be_read(page: Browser, width: int, is_dark: bool) -> None:
    page.look(width=width, is_dark=is_dark)
    assert page.ask("document.documentElement.scrollWidth") <= width
    back, text, soft = (
        luminance(page.ask(f"getComputedStyle(document.querySelector({where!r})).{what}"))
        for where, what in (("section", "backgroundColor"), ("body", "color"), (".soft", "color"))
    )
    assert (back < 0.1) == is_dark
    for ink in (text, soft):
        assert (max(ink, back) + 0.05) / (min(ink, back) + 0.05) >= 4.5
    if directory := os.environ.get("PAGE_PICTURES"):
        Path(directory, f"{width}-{'dark' if is_dark else 'light'}.png").write_bytes(page.picture())


def luminance(color: str) -> float:
    """Of ``rgb(r, g, b)``, as WCAG has it."""
    parts = [int(part) / 255 for part in color[4:-1].split(",")]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_buttons_of_a_hostile_name_act(server: Server, page: Browser) -> None:
    def listed() -> list[dict[str, object]]:
        rows: list[dict[str, object]] = server.request("/tier/conversations")["conversations"]
        return [row for row in rows if row["id"] == HOSTILE]

    assert len(listed()) == 1 and not listed()[0]["pins"]
    press(page, "Pin")
    said(page, "Pinned")
    (row,) = listed()
    assert row["pins"] and row["nvme"]
    press(page, "Unpin")
    said(page, "Unpinned")
    assert not listed()[0]["pins"]
    server.flush()
    assert listed()[0]["host"] == 0
    press(page, "Warm")
    page.wait_for("document.getElementById('said').textContent.includes(' tokens in memory')")
    said(page, f"{listed()[0]['host']:,} ")  # 0 where computing is sooner
    press(page, "Forget")  # asks once more
    page.ask(
        "[...document.querySelectorAll('#conversations button.sure')].forEach("
        "each => each.dispatchEvent(new MouseEvent('click', {detail: 2})))"
    )  # as the second click of a double one
    page.wait_for("[...document.querySelectorAll('button')].every(b => !b.disabled)")
    assert listed()[0]["nvme"]
    press(page, "Forget for good?")
    said(page, "Forgot")
    assert not any(row["nvme"] for row in listed())
    assert page.ask("document.title") == "Tiers" and not page.ask("document.images.length")


def test_late_list_of_another_tenant_is_dropped(page: Browser) -> None:
    """Its buttons would forget conversations of a tenant whose name is not shown."""
    page.ask(
        "window.straight = fetch; window.held = [];"
        "window.fetch = (path, ...more) => path.includes('extra_key=acme')"
        " ? new Promise(go => held.push(() => {"
        " const answer = straight(path, ...more); go(answer); return answer; }))"
        " : straight(path, ...more)"
    )
    for tenant in ("acme", ""):
        page.ask(
            f"document.getElementById('extra-key').value = {tenant!r};"
            "document.getElementById('tenant-form').requestSubmit()"
        )
    shown = "[...document.querySelectorAll('#conversations > li')].map(each => each.dataset.name)"
    page.wait_for(f"{shown}.length > 0")
    before = page.ask(shown)
    page.ask("Promise.all(held.map(each => each())).then(() => true)")
    page.ask("straight('.').then(() => true)")  # and the page has read them by now
    assert page.ask(shown) == before
    page.ask("window.fetch = straight")


def test_page_tells_when_the_server_is_gone(page: Browser) -> None:
    def network(is_offline: bool) -> None:
        page.tell(
            "Network.emulateNetworkConditions",
            offline=is_offline,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    assert page.errors == []
    network(is_offline=True)
    page.wait_for("!document.getElementById('gone').hidden")
    network(is_offline=False)
    page.wait_for("document.getElementById('gone').hidden")
