"""What is noted of a request is what happened to it, over SGLang's own tree and a real store."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_world import PAGE, CacheWorld, cache_world, prompt
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kit.waiting import eventually
from sglang_tiered.integration.observe import stories

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
    moments = [part["at_s"] for part in (lookup, plan, load, tier, line["prefill"])]
    assert moments == sorted(moments) and moments[-1] <= line["total_s"], "since it arrived"
    assert line["admitted_s"] <= line["total_s"]


def test_line_holds_no_key_or_token(world: CacheWorld, path: Path) -> None:
    runs(world, arrives(world, "r", HELD, extra_key="who", cache_salt="secret"))
    written = path.read_text() if lines(world, path) else ""
    assert "who" not in written and "secret" not in written
    assert not re.search(rf"[\[:,]{HELD[5]}\b", written), "figures of a time hold any digits"
    tenant = world.cache.hidden_tenants.tenant_of("who", "secret")
    assert json.loads(written)["tenant"] == tenant.hex()


def test_aborted_request_has_one_line(world: CacheWorld, path: Path) -> None:
    req = arrives(world, "r", HELD)
    world.cache.release_aborted_request(req.cache_request_handle)
    world.cache.tiering.notes.given_up(req.cache_request_handle, "revoked")  # as it is afterwards
    req.finished_reason = FINISH_LENGTH(1)
    world.cache.claim_kv_row(req)  # as after a handoff that failed
    line = lines(world, path)["r"]
    assert line["end"] == "abort" and "given_up" not in line
    assert len(path.read_bytes().splitlines()) == 1
    assert not world.cache.tiering.notes._stories


def test_last_batch_is_timed_after_the_release(world: CacheWorld, path: Path) -> None:
    """SGLang lets go of a request before anybody can know how long its batch took; another request
    may have its name by then."""
    cache, req = world.cache, arrives(world, "r", COLD)
    spans = [(len(COLD), 0)]
    other = arrives(world, "other", COLD)
    cache.tiering.notes.batch_ran([other], spans, 4.0, copies_beside=False)
    cache.finish_storage_prefetch_admission(req.cache_request_handle, 0, None)
    cache.tiering.notes.batch_ran([other], spans, 0.5, copies_beside=False)
    req.finished_reason = FINISH_LENGTH(1)
    assert not cache.claim_kv_row(req)
    cache.tiering.notes.batch_ran([req], spans, 0.25, copies_beside=False)
    again = arrives(world, "r", OTHER)
    assert cache.tiering.notes._stories[again.cache_request_handle].req is again
    prefill = lines(world, path)["r"]["prefill"]
    assert (prefill["prefill_s"], prefill["others_s"]) == (0.25, 0.5), "since it was admitted"


def test_line_waits_for_no_further_request(world: CacheWorld, path: Path) -> None:
    runs(world, arrives(world, "r", HELD))
    world.cache.check_hicache_events()  # as an idle scheduler does
    eventually(lambda: path.exists() and path.read_bytes().endswith(b"\n"), "written")


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
