"""How Envoy and gateways ask the picker, by Envoy's external processing over gRPC.

With a buffered body Envoy waits for one answer; a gateway streams the body through here, and gets
it back in chunks. The answer is a header and the same value as metadata (``envoy.lb``). No token
of an answer comes through: of responses only the head is looked at.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from sglang_tiered.route.envoy import DESTINATION, OWN_HEADERS, SUBSET
from sglang_tiered.route.picker import Picked, Picker, Refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from sglang_tiered.route.prompt import TokenReader
    from sglang_tiered.route.record import Numbers, Recorder
    from sglang_tiered.route.settings import Classes


SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
FULL_DUPLEX = 4
"""Of ``request_body_mode``: the body is streamed through."""

_PACKAGE = "sglang_tiered.route"
# Messages of Envoy's external processing, those fields of its v3 interface that a picker needs. The
# numbers are Envoy's, and v3 is frozen; fields that are not here are passed over. The interface's
# own package of stubs owns files of other packages, so it is not used. Names as in Envoy's
# ``ext_proc/v3/external_processor.proto``.
#
# A field is TYPE NAME NUMBER; ``*`` is a repeated one, ``|`` one of the message's only choice. An
# ``Entry`` is one of a map, and trailers are read as headers are: the bytes are the same.
_MESSAGES = """
HeaderValue: string key 1, string value 2, bytes raw_value 3
HeaderMap: *HeaderValue headers 1
HttpHeaders: HeaderMap headers 1, bool end_of_stream 3
HttpBody: bytes body 1, bool end_of_stream 2
Entry: string key 1, Struct value 2
Metadata: *Entry filter_metadata 1
ProtocolConfiguration: int32 request_body_mode 1
ProcessingRequest: |HttpHeaders request_headers 2, |HttpHeaders response_headers 3,\
 |HttpBody request_body 4, |HttpBody response_body 5, |HttpHeaders request_trailers 6,\
 |HttpHeaders response_trailers 7, Metadata metadata_context 8, *Entry attributes 9,\
 ProtocolConfiguration protocol_config 11
HeaderValueOption: HeaderValue header 1, int32 append_action 3
HeaderMutation: *HeaderValueOption set_headers 1, *string remove_headers 2
StreamedBodyResponse: bytes body 1, bool end_of_stream 2
BodyMutation: StreamedBodyResponse streamed_response 3
CommonResponse: HeaderMutation header_mutation 2, BodyMutation body_mutation 3,\
 bool clear_route_cache 5
CommonAnswer: CommonResponse response 1
TrailersResponse: HeaderMutation header_mutation 1
HttpStatus: int32 code 1
ImmediateResponse: HttpStatus status 1, HeaderMutation headers 2, bytes body 3
ProcessingResponse: |CommonAnswer request_headers 1, |CommonAnswer response_headers 2,\
 |CommonAnswer request_body 3, |CommonAnswer response_body 4, |TrailersResponse request_trailers 5,\
 |TrailersResponse response_trailers 6, |ImmediateResponse immediate_response 7,\
 Struct dynamic_metadata 8
"""
_Field = descriptor_pb2.FieldDescriptorProto
Struct = struct_pb2.Struct


SERVED = "x-gateway-destination-endpoint-served"
METADATA, HINT, ADDRESS = "envoy.lb", "envoy.lb.subset_hint", "upstream.address"
CHUNK_BYTES = 60_000
"""Envoy takes at most 64 KiB a message."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_BODY_BYTES = 16 << 20
"""Of a streamed body that is kept until it is whole; a longer one is picked for by its length."""
_OVERWRITE = 2
_SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse


def _add_field(message: Any, text: str) -> None:
    kind, name, number = text.split()
    bare = kind.lstrip("*|")
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if bare in ("string", "bytes", "bool", "int32"):
        field.type = _Field.Type.Value(f"TYPE_{bare.upper()}")
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = ".google.protobuf.Struct" if bare == "Struct" else f".{_PACKAGE}.{bare}"
    if kind.startswith("*"):
        field.label = _Field.LABEL_REPEATED
    elif kind.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")
        field.oneof_index = 0


def _classes(*wanted: str) -> list[Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="sglang_tiered/route.proto", package=_PACKAGE, syntax="proto3"
    )
    file.dependency.append("google/protobuf/struct.proto")
    for line in _MESSAGES.strip().splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for text in fields.split(","):
            _add_field(message, text)
    pool = descriptor_pool.Default()
    pool.Add(file)
    types = pool.FindFileByName(file.name).message_types_by_name
    return [message_factory.GetMessageClass(types[name]) for name in wanted]


Request, Response = _classes("ProcessingRequest", "ProcessingResponse")


def refusal_body(refused: Refused) -> bytes:
    """As OpenAI's API tells errors."""
    kind = "overloaded" if refused.status == 429 else "service_unavailable"
    error = {"message": refused.sentence, "type": kind, "code": refused.status}
    return json.dumps({"error": error}).encode()


class Decider:
    """The whole of a decision, however it was asked for. Of one event loop."""

    def __init__(
        self,
        reader: TokenReader,
        picker: Picker,
        classes: Classes,
        numbers: Numbers,
        recorder: Recorder | None = None,
    ) -> None:
        self._reader, self._classes, self._recorder = reader, classes, recorder
        self.picker, self.numbers = picker, numbers

    async def decide(
        self,
        headers: Mapping[str, str],
        body: bytes,
        subset: frozenset[str],
        *,
        is_awaited: bool = True,
    ) -> Picked | Refused:
        """Read a prompt and pick. ``headers`` with names in lower case."""
        started = time.perf_counter()
        path = headers.get(":path", "/v1/chat/completions").partition("?")[0]
        klass = self._classes.of(headers)
        # A server that is asked for tokens has work: where they decide nothing nobody waits for it.
        matters = (
            self.picker.has_choice() or klass.limit_s is not None or self._recorder is not None
        )
        key = headers.get("authorization", "")
        prompt = await self._reader.read(body, path, key, may_ask=matters)
        is_retry = headers.get("x-envoy-attempt-count", "1") != "1"
        answer = self.picker.pick(
            prompt,
            klass,
            request=headers.get("x-request-id", ""),
            is_retry=is_retry,
            subset=subset,
            is_awaited=is_awaited,
        )
        if self._recorder is not None and body and not is_retry:
            self._recorder.note(prompt)
        self.numbers.decided(answer, time.perf_counter() - started, is_retry)
        return answer


def subset_of(headers: Mapping[str, str], message: Any = None) -> frozenset[str]:
    """Return the addresses among which a gateway wants the choice."""
    told = headers.get(SUBSET, "")
    for entry in () if message is None else message.metadata_context.filter_metadata:
        if entry.key == HINT and SUBSET in entry.value:
            value = entry.value[SUBSET]
            told = value if isinstance(value, str) else ",".join(map(str, value))
    return frozenset(filter(None, (part.strip() for part in told.split(","))))


def _headers(message: Any) -> dict[str, str]:
    return {
        one.key.lower(): (one.raw_value or one.value.encode()).decode("latin-1")
        for one in message.headers.headers
    }


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode("latin-1", "replace")


def add_to(server: Any, decider: Decider) -> None:
    """Answer Envoy on a server of ``grpc.aio``, and the health check that it makes."""
    process_one = grpc.stream_stream_rpc_method_handler(
        partial(process, decider), Request.FromString, Response.SerializeToString
    )
    check = grpc.unary_unary_rpc_method_handler(_healthy)
    for service, methods in (
        (SERVICE, {METHOD: process_one}),
        ("grpc.health.v1.Health", {"Check": check}),
    ):
        handler = grpc.method_handlers_generic_handler(service, methods)
        server.add_generic_rpc_handlers((handler,))


async def process(decider: Decider, messages: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
    """Answer the messages of one request of a client."""
    one = _Exchange(decider)
    try:
        async for message in messages:
            for response in await one.answer(message):
                yield response
    finally:
        one.close()


class _Exchange:
    """One request of a client, as Envoy tells it."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider
        self._headers: dict[str, str] = {}
        self._subset: frozenset[str] = frozenset()
        self._body, self._is_duplex = bytearray(), False
        self._picked: Picked | None = None
        self._was_answered = False

    async def answer(self, message: Any) -> list[Any]:
        """Return what a message is answered with."""
        is_whole, trailing = True, []
        kind = message.WhichOneof("choice")
        if message.HasField("protocol_config"):
            self._is_duplex = message.protocol_config.request_body_mode == FULL_DUPLEX
        if kind == "response_headers":
            return [self._head(message)]
        if kind == "request_headers":
            self._headers = _headers(message.request_headers)
            self._subset = subset_of(self._headers, message)
            if not message.request_headers.end_of_stream:
                return [] if self._is_duplex else [_answer(kind)]
        elif kind == "request_body":
            part = message.request_body
            if self._picked is not None:  # of a body that was too long to wait for
                return _chunks(part.body, is_last=part.end_of_stream)
            self._body += part.body
            is_whole = part.end_of_stream
            if not is_whole and len(self._body) <= MAX_BODY_BYTES:
                return []
        elif kind == "request_trailers" and self._is_duplex and self._picked is None:
            kind, is_whole, trailing = "request_body", False, [_answer(kind)]  # its last chunk
        else:
            return [] if kind is None else [_answer(kind)]
        body = bytes(self._body)
        answer = await self._decider.decide(self._headers, body, self._subset)
        if isinstance(answer, Refused):
            return [_refusal(answer)]
        self._picked, self._body = answer, bytearray()
        return [*_responses(kind, answer, body, self._is_duplex, is_whole=is_whole), *trailing]

    def _head(self, message: Any) -> Any:
        self._was_answered = True
        picker, numbers, picked = self._decider.picker, self._decider.numbers, self._picked
        status = _headers(message.response_headers).get(":status", "")
        told = (str(one.value[ADDRESS]) for one in message.attributes if ADDRESS in one.value)
        served = next(told, "")
        if picked is not None:
            picker.answered(picked, status == "200", served)
            numbers.answered(picked, status, served, time.monotonic() - picked.started_s)
        response = _answer("response_headers")
        if served:
            _set(response.response_headers.response.header_mutation, {SERVED: served})
        return response

    def close(self) -> None:
        """The client has its answer, or it or the server went away before its head."""
        if self._picked is not None and not self._was_answered:
            self._decider.numbers.unanswered.inc()
            self._decider.picker.ended(self._picked)


async def _healthy(_request: bytes, _context: Any) -> bytes:
    return _SERVING


def _answer(kind: str) -> Any:
    response = Response()
    getattr(response, kind).SetInParent()
    return response


def _refusal(refused: Refused) -> Any:
    response = Response()
    immediate = response.immediate_response
    immediate.status.code = refused.status
    immediate.body = refusal_body(refused)
    told = {"retry-after": str(refused.retry_after_s), "content-type": "application/json"}
    _set(immediate.headers, told)
    return response


def _responses(
    kind: str, picked: Picked, body: bytes, is_duplex: bool, *, is_whole: bool
) -> list[Any]:
    # In a stream the headers are answered first, then the body goes back.
    first = Response()
    is_body = kind == "request_body" and not is_duplex
    common = (first.request_body if is_body else first.request_headers).response
    told = picked.headers()
    common.clear_route_cache = True
    _set(common.header_mutation, told)
    common.header_mutation.remove_headers.extend(name for name in OWN_HEADERS if name not in told)
    inner = Struct()
    inner.update({DESTINATION: picked.destination})
    first.dynamic_metadata.fields[METADATA].struct_value.CopyFrom(inner)
    if is_duplex and kind == "request_body":
        return [first, *_chunks(body, is_last=is_whole)]
    return [first]


def _chunks(body: bytes, *, is_last: bool) -> list[Any]:
    """A part of a body on its way back to a gateway."""
    responses = []
    for at in range(0, max(1, len(body)), CHUNK_BYTES):
        response = Response()
        part = response.request_body.response.body_mutation.streamed_response
        part.body = body[at : at + CHUNK_BYTES]
        part.end_of_stream = is_last and at + CHUNK_BYTES >= len(body)
        responses.append(response)
    return responses
