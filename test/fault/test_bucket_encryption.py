"""Encryption at rest as the environment asks for it: on everything that is written, or a
bucket whose policy demands it would refuse some of it, and a bucket without one would keep it as it
is."""

from __future__ import annotations

import pytest
from bucket_engines import TIMEOUT_S, opened, run_of, store
from object_proxy import Exchange, FaultProxy, Request

from kit.runs import NAMESPACE
from sglang_tiered.storage.base import Erasure, PinRefusal, Reason
from sglang_tiered.storage.bucket.collect import Collector, CollectorSettings
from sglang_tiered.storage.bucket.requests import Requests
from sglang_tiered.storage.promises import is_true

pytestmark = pytest.mark.timeout(120)

ALGORITHM = "x-amz-server-side-encryption"
KEY = "x-amz-server-side-encryption-aws-kms-key-id"
KEY_NAME = "arn:aws:kms:us-east-1:123456789012:key/of-tests"
TENANT = b"t" * 16


def test_everything_that_is_written_asks_for_it(
    s3_url: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages in one put and in parts, records, pins, and what the collector writes. A part
    carries none: its upload does, and S3 refuses them there."""
    monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
    monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", KEY_NAME)
    seen: list[Request] = []

    def note(exchange: Exchange) -> None:
        seen.append(exchange.request)
        exchange.answer(exchange.forward())

    for kind in ("put", "begin multipart", "part", "complete multipart"):
        proxy.add(kind, "", note)
    large = run_of(1, num_pages=1, page_bytes=65 << 20)
    with opened(s3_url, staging_bytes=256 << 20) as engine:
        assert store(engine, large, run_of(2, tenant=TENANT)) == {Reason.OK}
        assert is_true(engine.erase(Erasure(tenant=TENANT)), TIMEOUT_S)
        pinned = engine.pin("a", large.keys)
        assert not isinstance(pinned, PinRefusal)
        assert is_true(pinned, TIMEOUT_S)
    Collector(Requests(s3_url), CollectorSettings()).run_once(NAMESPACE)
    asking = [request for request in seen if request.kind in ("put", "begin multipart")]
    written = " ".join(request.target for request in asking)
    assert all(what in written for what in ("/pages/", "/erased/", "/pins/", "/collected"))
    for request in seen:
        asked = ("aws:kms", KEY_NAME) if request in asking else (None, None)
        assert (request.headers[ALGORITHM], request.headers[KEY]) == asked, request.target
    assert {request.kind for request in seen} > {"part", "complete multipart"}
