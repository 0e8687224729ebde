"""What a gateway that streams a body through is answered, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sglang_tiered.route.ext_proc import FULL_DUPLEX, Decider, Request, process
from sglang_tiered.route.fleet import Fleet, Member
from sglang_tiered.route.picker import Picker
from sglang_tiered.route.prompt import TokenReader
from sglang_tiered.route.record import Numbers
from sglang_tiered.route.settings import Classes, Source


def test_body_that_ends_with_trailers_is_picked_for(tmp_path: Path) -> None:
    """Its last chunk does not say that it is the last. No byte of a header evades the pick."""
    head, body, end = Request(), Request(), Request()
    head.protocol_config.request_body_mode = FULL_DUPLEX
    head.request_headers.end_of_stream = False
    head.request_headers.headers.headers.add(key="x-request-id", raw_value=b"\xff")
    body.request_body.body = b'{"prompt": [1, 2]}'
    end.request_trailers.SetInParent()

    async def messages() -> AsyncIterator[Any]:
        for message in (head, body, end):
            yield message

    async def run() -> list[Any]:
        (tmp_path / "servers").write_text("")
        fleet = Fleet(Source(str(tmp_path / "servers")))
        member = Member("http://192.0.2.1:1", "192.0.2.1:1", is_up=True, seen_s=fleet._clock())
        fleet.members[member.address] = member
        reader = TokenReader(None, fleet.tokenize, 5.0)
        decider = Decider(reader, Picker(fleet), Classes(None), Numbers())
        try:
            return [one async for one in process(decider, messages(), None)]
        finally:
            reader.close()
            await fleet.close()

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        answers = runner.run(run())
    kinds = [one.WhichOneof("choice") for one in answers]
    assert kinds == ["request_headers", "request_body", "request_trailers"]
    part = answers[1].request_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (body.request_body.body, False)
    inner = answers[0].dynamic_metadata.fields["envoy.lb"].struct_value
    assert inner["x-gateway-destination-endpoint"] == "192.0.2.1:1"
