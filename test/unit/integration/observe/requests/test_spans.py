"""What the tiers did for a request is in its own trace, through SGLang's own tracing."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.observability import trace
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_tiered.integration.observe.stories import PREFIX, tell_spans
from sglang_tiered.integration.observe.story import LoadMeter, Story
from sglang_tiered.request_log import Copy, Load, Lookup, Plan, Wait
from sglang_tiered.storage.base import Job, JobKind, Reason, Run, Tier

KEYS = tuple(bytes([number]) * 32 for number in range(2))
UNIX_S = 1000.0


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """SGLang's tracing, as ``process_tracing_init`` leaves it, into memory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=trace.TraceCustomIdGenerator())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    monkeypatch.setattr(trace, "tracer", provider.get_tracer("sglang server"))
    monkeypatch.setattr(trace, "threads_info", {})
    return exporter


def traced(name: str = "r") -> Req:
    """A request that came with the trace of the process before."""
    sent = APIServerReqTimeStats()
    sent.init_trace_ctx(name, None)
    sent.set_created_time()
    received = APIServerReqTimeStats()
    received.decode_json(sent.encode_json())
    return Req(name, "", [1, 2], SamplingParams(max_new_tokens=1), time_stats=received)


def loaded(req: Req) -> Story:
    """A story with all that spans are of; times begin at 1 s."""
    now = [1.3]
    meter = LoadMeter(lambda: now[0])
    page = (memoryview(bytearray(100)),)
    job = Job(JobKind.LOAD, Run(KEYS, (page, page), meter=meter))
    ended = meter.begins(Tier.NVME, 200)
    now[0] = 1.4
    meter.verified(0.01)
    now[0] = 1.5
    job.reasons = [Reason.OK, Reason.CORRUPT]
    ended(job)
    story = Story.begins(1.0)
    story.req, story.meter, line = req, meter, story.line
    line.lookup = Lookup(at_s=1.0, lookup_s=0.1, page_tokens=64, num_nvme_pages=2)
    line.waits = (Wait(why="load", at_s=1.25, wait_s=0.35),)
    line.plan = Plan(at_s=1.1, decision="load", load_s=0.3, num_nvme_tokens=128)
    line.load = Load(at_s=1.2, load_s=0.4, num_loaded_tokens=64)
    line.copy = Copy(at_s=1.7, copy_s=0.1, num_tokens=64, num_bytes=100)
    return story


def test_spans_are_in_the_requests_own_trace(exported: InMemorySpanExporter) -> None:
    req = traced()
    story = loaded(req)
    tell_spans(story, UNIX_S)
    tell_spans(story, UNIX_S, is_over=True)
    found = [span for span in exported.get_finished_spans() if span.name.startswith("tier_")]
    spans: dict[str, Any] = {span.name: span for span in found}
    assert len(spans) == len(found), "each is told once"
    names = ["lookup", "wait", "load", "read", "verify", "copy"]
    assert sorted(spans) == sorted(f"tier_{name}" for name in names)
    thread = req.time_stats.trace_ctx.thread_context.thread_span.get_span_context()
    for span in found:
        assert span.context.trace_id == thread.trace_id and span.parent.span_id == thread.span_id
    for name, took in (("load", (1.2, 1.6)), ("read", (1.3, 1.5)), ("verify", (1.39, 1.4))):
        span = spans[f"tier_{name}"]
        times = (span.start_time / 1e9 - UNIX_S, span.end_time / 1e9 - UNIX_S)
        assert times == pytest.approx(took)
    read = spans["tier_read"].attributes
    assert read[f"{PREFIX}tier"] == "nvme" and read[f"{PREFIX}failed.corrupt"] == 1
    assert read[f"{PREFIX}num_failed_pages"] == 1
    load, verify = spans["tier_load"].attributes, spans["tier_verify"].attributes
    assert {f"{PREFIX}{name}" for name in ("num_tokens", "num_loaded_tokens", "expected_s")} <= {
        *load
    }
    assert verify[f"{PREFIX}thread_s"] == pytest.approx(0.01)
