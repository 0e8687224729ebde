"""``GET /tier/costs`` of a live server: true, protected, and answered while the scheduler hangs.
``GET /tier/``, the page for people, in a browser: what it does on the same server. And loading is
measured against computing there, and never waited for in vain.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from conftest import PAGE, Disk, Launch, aligned, make_prompts, until
from kit.chromium import Browser, chromium
from kit.waiting import eventually
from server_process import Server
from sglang_tiered.demo.model import SHAPES, write_model
from sglang_tiered.policy.server_costs import RankCosts, costs_key, parse_server_costs

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS, LENGTH = 3, 1500
PROMPTS = make_prompts(101, NUM_PROMPTS, LENGTH)
KEY = "admin-of-the-test"
ANSWER_S = 2.0  # many times what an answer takes, less than any of the hangs here
HOSTILE = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"


@pytest.fixture(scope="module")
def server(
    launch: Launch, disk: Disk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Its model takes long to compute, so that a plan does not change by the moment."""
    directory = tmp_path_factory.mktemp("tier") / "kv"
    write_model(directory.parent / "model", 0, SHAPES["8m"])
    with pytest.MonkeyPatch.context() as patch:
        opener = urllib.request.build_opener()
        opener.addheaders = [("Authorization", f"Bearer {KEY}")]
        patch.setattr(urllib.request, "_opener", opener)  # for whatever asks below
        yield launch(
            *("--max-total-tokens", "16384", "--tier-host-bytes", "96MiB"),
            *("--tier-dir", str(directory), "--admin-api-key", KEY),
            *("--tier-log-requests", str(directory.parent / "requests.jsonl")),
            model_path=directory.parent / "model",
        )


def status(server: Server, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.build_opener().open(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def rank(server: Server) -> RankCosts:
    with urllib.request.urlopen(server.url + "/tier/costs", timeout=ANSWER_S) as response:
        (record,) = parse_server_costs(response.read()).ranks
    return record


def test_each_key_opens_what_it_is_for(server: Server) -> None:
    paths = ("/tier/costs", "/tier/tenants", "/tier/requests", "/flush_cache")
    for path in paths[:3]:
        assert [status(server, path, key) for key in (None, "wrong", KEY)] == [401, 401, 200]
    assert [status(server, path, costs_key(KEY)) for path in paths] == [200, 401, 401, 401]


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


def test_hung_scheduler_is_answered_for_with_its_age(server: Server) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    (scheduler,) = (child for child in children if "scheduler" in " ".join(child.cmdline()))
    scheduler.suspend()
    try:
        first = rank(server)
        eventually(lambda: rank(server).age_s > first.age_s + 1.5)
        assert rank(server).at == first.at
    finally:
        scheduler.resume()
    eventually(lambda: rank(server).at > first.at and rank(server).age_s < 2.0)


# ---- The page ----


def test_page_holds_nothing_without_the_key(server: Server) -> None:
    with urllib.request.build_opener().open(server.url + "/tier/", timeout=60) as response:
        policy, text = response.headers["Content-Security-Policy"], response.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http" not in text


@pytest.fixture(scope="module")
def page(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page, with its key given after a wrong one."""
    program, why_not = chromium()
    if program is None:
        pytest.skip(why_not)
    server.generate(PROMPTS[0], conversation_id=HOSTILE, rid="hostile")
    with Browser(program, tmp_path_factory.mktemp("profile")) as browser:
        browser.go(server.url + "/tier/")
        for key in ("wrong", KEY):
            browser.wait_for("document.getElementById('entry')?.hidden === false")
            browser.ask(
                f"document.getElementById('key').value = {key!r};"
                "document.querySelector('#key-form button').click()"
            )
            if key == "wrong":
                browser.wait_for("!document.getElementById('refused').hidden")
                assert not browser.ask("document.querySelector('main').innerText.includes('NVMe')")
        browser.wait_for("!!document.querySelector('#conversations .name')")
        browser.errors.clear()  # the 401 that asks for it
        yield browser


def press(page: Browser, words: str, said: str) -> None:
    """A button of the hostile conversation, and what is said afterwards."""
    page.wait_for("[...document.querySelectorAll('#conversations button')].every(b=>!b.disabled)")
    rows = "[...document.querySelectorAll('#conversations > li')]"
    row = f"{rows}.find(r=>r.dataset.name==={HOSTILE!r})"
    page.wait_for(f"!!{row}")
    page.ask(f"[...{row}.querySelectorAll('button')].find(b=>b.textContent==={words!r}).click()")
    page.wait_for(f"document.getElementById('said').textContent.includes({said!r})")


def test_buttons_of_a_hostile_name_act(server: Server, page: Browser) -> None:
    def listed() -> dict[str, Any]:
        rows = server.request("/tier/conversations")["conversations"]
        (row,) = (row for row in rows if row["id"] == HOSTILE)
        return dict(row)

    press(page, "Pin", "Pinned")
    assert listed()["pins"] and listed()["nvme"]
    press(page, "Unpin", "Unpinned")
    assert not listed()["pins"]
    server.flush()
    press(page, "Warm", " tokens in memory")
    press(page, "Forget", "")  # asks once more
    page.ask(
        "[...document.querySelectorAll('#conversations button.sure')].forEach("
        "each => each.dispatchEvent(new MouseEvent('click', {detail: 2})))"
    )  # as the second click of a double one
    page.wait_for("[...document.querySelectorAll('button')].every(b => !b.disabled)")
    assert listed()["nvme"]
    press(page, "Forget for good?", "Forgot")
    assert not server.request("/tier/residency", {"input_ids": PROMPTS[0]})["nvme"]
    assert page.ask("document.title") == "Tiers" and not page.ask("document.images.length")
    assert page.errors == []


def test_late_list_of_another_tenant_is_dropped(page: Browser) -> None:
    """Its buttons would forget conversations of a tenant whose name is not shown."""
    page.ask(
        "window.straight = fetch; window.held = [];"
        "window.fetch = (path, ...more) => path.includes('extra_key=acme')"
        " ? new Promise(go => held.push(() => {"
        " const answer = straight(path, ...more); go(answer); return answer; }))"
        " : straight(path, ...more)"
    )
    page.wait_for("[...document.querySelectorAll('button')].every(b => !b.disabled)")
    page.ask("document.getElementById('conversations').replaceChildren()")
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


# The last: what it learns of the disk is not so.
def test_slow_disk_is_abandoned_declined_then_used_again(server: Server, disk: Disk) -> None:
    server.flush()
    expected = [server.generate(prompt).output_ids for prompt in PROMPTS]
    server.wait_for_state("tier_pages:nvme", NUM_PROMPTS * (LENGTH // PAGE))

    def decided(what: str) -> float:
        return server.tier_state()[f"load_decision_tokens:{what}"]

    def asked_again(what: str) -> float:
        server.flush()
        assert [server.generate(prompt).output_ids for prompt in PROMPTS] == expected
        return decided(what)

    before = {what: decided(what) for what in ("gave_up", "declined")}
    disk.order(read_s=10)
    server.flush()
    begun = time.monotonic()
    assert server.generate(PROMPTS[0]).output_ids == expected[0]
    assert time.monotonic() - begun < 10, "the answer waited for a read that takes 10 s"
    assert decided("gave_up") > before["gave_up"]
    server.flush()  # refused while that read still goes on; it must not stop the server

    disk.order(read_s=5)  # still several times what computing takes
    declined = lambda: asked_again("declined") > before["declined"]  # noqa: E731
    until(declined, "slow loads are never declined", 240.0)
    disk.order()
    loaded = decided("load")
    until(lambda: asked_again("load") > loaded, "a disk that recovered is never used again", 60.0)
