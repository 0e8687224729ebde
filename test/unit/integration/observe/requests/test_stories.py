"""What is noted of a request is what happened to it, over SGLang's own tree and a real store."""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world, prompt
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.observe import stories
from sglang_tiered.policy.cost_model import PrefillCost
from sglang_tiered.policy.prefetch import PrefetchWindow

HELD, OTHER, COLD = prompt(1, 16), prompt(2, 8), prompt(3, 4)
SCHEDULER = SimpleNamespace(waiting_queue=[1, 2], running_batch=SimpleNamespace(reqs=[3]))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def world(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheWorld]:
    """NVMe holds two prompts."""
    with cache_world(tmp_path / "kv", monkeypatch, log=path) as world:
        world.store(HELD, OTHER)
        yield world


def arrives(world: CacheWorld, name: str, tokens: array[int], **of: Any) -> Req:
    """As the scheduler's ``_prefetch_kvcache`` and our hook before it have it."""
    req = Req(name, "", tokens[:], SamplingParams(max_new_tokens=1), **of)
    world.cache.tiering.notes.arrives(SCHEDULER, req)
    assert world.asks(name, tokens) == req.cache_request_handle
    return req


def admitted(world: CacheWorld, req: Req, num_loaded: int = 0) -> None:
    """Its turn comes."""
    cache, handle = world.cache, req.cache_request_handle
    world.until(lambda: cache.check_prefetch_progress(handle))
    cache.finish_storage_prefetch_admission(handle, num_loaded, None)


def runs(world: CacheWorld, req: Req, *, num_loaded: int = 0) -> None:
    """From its turn to its end, as a batch of its own."""
    cache, handle = world.cache, req.cache_request_handle
    world.until(lambda: cache.check_prefetch_progress(handle))
    cache.pop_prefetch_loaded_span(handle)
    cache.finish_storage_prefetch_admission(handle, num_loaded, None)
    req.cached_tokens_storage = num_loaded
    num_tokens = len(req.origin_input_ids)
    spans = [(num_tokens - num_loaded, num_loaded)]
    cache.tiering.notes.batch_ran([req], spans, 0.5, copies_beside=False)
    req.output_ids.append(1)
    req.finished_reason = FINISH_LENGTH(1)
    assert not cache.claim_kv_row(req)


def lines(world: CacheWorld, path: Path) -> dict[str, Any]:
    """The lines so far, by rid."""
    world.cache.tiering.notes.close()
    if not path.exists():
        return {}
    return {line["rid"]: line for line in map(json.loads, path.read_bytes().splitlines())}


def test_loaded_request_tells_whence_and_how(world: CacheWorld, path: Path) -> None:
    req = arrives(world, "r", HELD, extra_key="who", cache_salt="secret")
    runs(world, req, num_loaded=len(HELD))
    line = lines(world, path)["r"]
    assert (line["v"], line["end"], line["num_output_tokens"]) == (1, "length", 1)
    assert (line["num_ahead"], line["num_running"]) == (2, 1)
    assert line["tokens"] == {"num_nvme": len(HELD)}
    lookup, plan, load = line["lookup"], line["plan"], line["load"]
    assert (lookup["num_nvme_pages"], lookup["page_tokens"]) == (16, PAGE)
    assert (plan["decision"], plan["num_nvme_tokens"]) == ("load", len(HELD))
    assert 0 < plan["load_s"] < plan["prefill_all_s"] and plan["prefill_rest_s"] > 0
    (tier,) = load["tiers"]
    num_bytes = len(HELD) * world.cache.tiering.planner.costs.bytes_per_token
    assert (tier["tier"], tier["num_bytes"], "failed" in tier) == ("nvme", num_bytes, False)
    assert tier["verify_s"] > 0 and 0 < tier["read_s"] <= load["load_s"] and tier["expected_s"] > 0
    assert load["num_tokens"] == load["num_loaded_tokens"] == len(HELD)
    assert line["prefill"]["prefill_s"] == 0.5
    assert line["admitted_s"] <= line["total_s"]


def test_prefills_of_others_before_first_token_are_told(world: CacheWorld, path: Path) -> None:
    """With overlap a request's token comes out behind the launch of the batch after its own."""
    cache, notes = world.cache, world.cache.tiering.notes
    first, second = arrives(world, "first", HELD), arrives(world, "second", COLD)
    notes.batch_ran([second], [(len(COLD), 0)], 9.0, copies_beside=False)  # before it was admitted
    admitted(world, first)
    notes.batch_ran([first], [(len(HELD), 0)], 0.5, copies_beside=False)
    notes.batch_ran([second], [(len(COLD), 0)], 21.0, copies_beside=False)
    first.time_stats.prefill_finished_time = notes.clock()
    notes.batch_ran([second], [(len(COLD), 0)], 7.0, copies_beside=False)  # while it generates
    first.output_ids.append(1)
    first.finished_reason = FINISH_LENGTH(1)
    assert not cache.claim_kv_row(first)
    prefill = lines(world, path)["first"]["prefill"]
    assert (prefill["prefill_s"], prefill["others_s"]) == (0.5, 21.0)


def test_line_holds_no_key_or_token(world: CacheWorld, path: Path) -> None:
    runs(world, arrives(world, "r", HELD, extra_key="who", cache_salt="secret"))
    written = path.read_text() if lines(world, path) else ""
    assert "who" not in written and "secret" not in written
    assert not re.search(rf"[\[:,]{HELD[5]}\b", written), "figures of a time hold any digits"
    tenant = world.cache.hidden_tenants.tenant_of("who", "secret")
    assert json.loads(written)["tenant"] == tenant.hex()


def test_absent_prefix_is_no_declined_one(world: CacheWorld, path: Path) -> None:
    runs(world, arrives(world, "absent", COLD))
    world.cache.tiering.planner.costs.prefill = PrefillCost((1e-9, 1e-12, 0.0))
    runs(world, arrives(world, "declined", HELD))
    found = lines(world, path)
    assert found["absent"]["plan"]["decision"] == "absent"
    plan = found["declined"]["plan"]
    assert plan["decision"] == "declined" and "load" not in found["declined"]
    assert plan["held_load_s"] > plan.get("held_prefill_s", 0.0)
    assert found["declined"]["lookup"]["num_nvme_pages"] == 16


def test_put_off_request_says_for_what(world: CacheWorld, path: Path) -> None:
    world.cache.tiering.loads._window = PrefetchWindow(4 * PAGE)
    first = arrives(world, "first", HELD)
    second = arrives(world, "second", OTHER)
    assert not world.cache.check_prefetch_progress(second.cache_request_handle)
    runs(world, first, num_loaded=len(HELD))
    world.until(lambda: world.is_retried(second.cache_request_handle))
    assert not world.cache.check_prefetch_progress(second.cache_request_handle)
    world.asks("second", OTHER)
    runs(world, second, num_loaded=len(OTHER))
    line = lines(world, path)["second"]
    whys = [wait["why"] for wait in line["waits"]]
    assert whys[0] == "window" and set(whys) <= {"window", "load"}
    assert line["lookup"]["num_lookups"] == 2
    waited_s = sum(wait["wait_s"] for wait in line["waits"])
    assert waited_s <= line["admitted_s"] + 1e-5 * len(whys)


@pytest.mark.parametrize("why", ["late", "deadline"])
def test_request_without_its_load_says_why(
    world: CacheWorld, path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    is_bounded = why == "late"
    monkeypatch.setattr(world.cache.tiering.planner, "should_wait", lambda *_, **__: not is_bounded)
    storage, disk_answers = world.cache.storage, threading.Event()
    begin = storage.begin_load

    def begin_late(*arguments: Any, **named: Any) -> Any:
        assert disk_answers.wait(60)
        return begin(*arguments, **named)

    monkeypatch.setattr(storage, "begin_load", begin_late)
    req = arrives(world, "r", HELD)
    handle = req.cache_request_handle
    operation = world.cache.ongoing_prefetch[handle].operation
    if why == "deadline":
        assert not world.cache._prefetch_deadline_expired(operation)
        world.cache._mark_prefetch_deadline_expired(operation)
    assert world.cache._prefetch_deadline_expired(operation)
    disk_answers.set()
    world.until(lambda: world.cache.load_has_ended(handle))
    runs(world, req)
    given_up = lines(world, path)["r"]["given_up"]
    assert (given_up["why"], given_up["num_tokens"]) == (why, len(HELD))


def test_aborted_request_has_one_line(world: CacheWorld, path: Path) -> None:
    req = arrives(world, "r", HELD)
    world.cache.release_aborted_request(req.cache_request_handle)
    req.finished_reason = FINISH_LENGTH(1)
    world.cache.claim_kv_row(req)  # as after a handoff that failed
    assert lines(world, path)["r"]["end"] == "abort"
    assert len(path.read_bytes().splitlines()) == 1
    assert not world.cache.tiering.notes._stories


def test_line_waits_for_the_time_of_its_batch(world: CacheWorld, path: Path) -> None:
    """On an accelerator a batch is timed after SGLang has released what ended with it."""
    req = arrives(world, "r", HELD)
    admitted(world, req, len(HELD))
    cache, notes = world.cache, world.cache.tiering.notes
    with pytest.raises(RuntimeError, match="of SGLang"), notes.until_timed():
        req.output_ids.append(1)
        req.finished_reason = FINISH_LENGTH(1)
        for _ in range(2):
            cache.claim_kv_row(req)
        notes.batch_ran([req], [(64, len(HELD) - 64)], 0.5, copies_beside=True)
        raise RuntimeError("of SGLang")
    assert not notes._stories
    written = path.read_bytes() if lines(world, path) else b""
    (line,) = map(json.loads, written.splitlines())
    assert (line["end"], line["prefill"]["prefill_s"]) == ("length", 0.5)


def test_flush_of_a_paused_server_keeps_what_waits(world: CacheWorld, path: Path) -> None:
    """SGLang empties the tree under requests that wait, when weights change."""
    req = arrives(world, "r", COLD)
    world.cache.tiering.tree_was_reset()
    runs(world, req)
    line = lines(world, path)["r"]
    assert line["num_ahead"] == 2 and line["plan"]["decision"] == "absent"
    assert world.cache.tiering.planner.loads.wait_stats().requests.count == 1


def test_load_after_retraction_leaves_first_ones_figures(world: CacheWorld) -> None:
    notes, req = world.cache.tiering.notes, arrives(world, "r", HELD)
    admitted(world, req, len(HELD))
    handle = req.cache_request_handle
    story = notes._stories[handle]
    before = story.load_ended_at, story.num_loaded, story.given_up
    notes.begun(handle)  # retracted, it was looked up once more
    assert story.meter is not None and notes.meter_of(handle) is None
    notes.given_up(handle, "late", PAGE)
    notes.load_ended(handle, PAGE)
    assert (story.load_ended_at, story.num_loaded, story.given_up) == before
    assert story.num_loaded == len(HELD)


def test_requests_that_never_end_are_bounded(
    world: CacheWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stories, "MAX_STORIES", 2)
    for number in range(5):
        arrives(world, f"r{number}", COLD)
    assert [handle.rid for handle in world.cache.tiering.notes._stories] == ["r3", "r4"]


def test_id_of_any_length_makes_a_line(world: CacheWorld, path: Path) -> None:
    """Clients choose ids; one of a megabyte would be no line that ``explain`` reads."""
    runs(world, arrives(world, "\ud800" + "r" * (1 << 20), COLD))
    assert list(lines(world, path)) == ["\\ud800" + "r" * 255]
    assert world.cache.tiering.notes.num_dropped == 0


def test_health_checks_are_no_requests(world: CacheWorld, path: Path) -> None:
    runs(world, arrives(world, "HEALTH_CHECK_1", COLD))
    assert lines(world, path) == {}
    assert world.cache.process_stats().waits.requests.count == 0
    runs(world, arrives(world, "r", COLD))
    assert world.cache.process_stats().waits.requests.count == 1


def test_nothing_is_kept_without_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_world(tmp_path / "kv", monkeypatch) as world:
        world.store(HELD)
        notes = world.cache.tiering.notes
        req = arrives(world, "r", HELD)
        assert not notes._stories
        assert notes.meter_of(req.cache_request_handle) is None
        with notes.until_timed():
            runs(world, req, num_loaded=len(HELD))
        assert not notes._stories and not notes._starting
        assert world.cache.process_stats().request_log_dropped is None


def test_lost_lines_are_a_statistic(world: CacheWorld) -> None:
    assert world.cache.process_stats().request_log_dropped == 0
    world.cache.tiering.notes._writer._num_lost = 3
    assert world.cache.process_stats().request_log_dropped == 3
