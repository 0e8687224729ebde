"""Messages of Envoy's external processing, those fields of its v3 interface that a picker needs.

The numbers are Envoy's, and v3 is frozen; fields that are not here are passed over. The interface's
own package of stubs owns files of other packages, so it is not used. Names as in Envoy's
``ext_proc/v3/external_processor.proto``.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

__all__ = ["BUFFERED", "FULL_DUPLEX", "METHOD", "SERVICE", "Request", "Response", "Struct"]

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
BUFFERED, FULL_DUPLEX = 2, 4
"""Values of ``request_body_mode``."""

_PACKAGE = "sglang_tiered.route"
# A field is TYPE NAME NUMBER; ``*`` is a repeated one, ``|`` one of the message's only choice, and
# ``%`` a map from text.
_MESSAGES = """
HeaderValue: string key 1, string value 2, bytes raw_value 3
HeaderMap: *HeaderValue headers 1
HttpHeaders: HeaderMap headers 1, bool end_of_stream 3
HttpBody: bytes body 1, bool end_of_stream 2
HttpTrailers: HeaderMap trailers 1
Metadata: %Struct filter_metadata 1
ProtocolConfiguration: int32 request_body_mode 1, int32 response_body_mode 2
ProcessingRequest: |HttpHeaders request_headers 2, |HttpHeaders response_headers 3,\
 |HttpBody request_body 4, |HttpBody response_body 5, |HttpTrailers request_trailers 6,\
 |HttpTrailers response_trailers 7, Metadata metadata_context 8, %Struct attributes 9,\
 ProtocolConfiguration protocol_config 11
HeaderValueOption: HeaderValue header 1, int32 append_action 3
HeaderMutation: *HeaderValueOption set_headers 1, *string remove_headers 2
StreamedBodyResponse: bytes body 1, bool end_of_stream 2
BodyMutation: |bytes body 1, |bool clear_body 2, |StreamedBodyResponse streamed_response 3
CommonResponse: int32 status 1, HeaderMutation header_mutation 2, BodyMutation body_mutation 3,\
 bool clear_route_cache 5
CommonAnswer: CommonResponse response 1
TrailersResponse: HeaderMutation header_mutation 1
HttpStatus: int32 code 1
ImmediateResponse: HttpStatus status 1, HeaderMutation headers 2, bytes body 3, string details 5
ProcessingResponse: |CommonAnswer request_headers 1, |CommonAnswer response_headers 2,\
 |CommonAnswer request_body 3, |CommonAnswer response_body 4, |TrailersResponse request_trailers 5,\
 |TrailersResponse response_trailers 6, |ImmediateResponse immediate_response 7,\
 Struct dynamic_metadata 8
"""
_Field = descriptor_pb2.FieldDescriptorProto
_PLAIN = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
}
Struct = struct_pb2.Struct


def _set_type(field: Any, name: str) -> None:
    if name in _PLAIN:
        field.type = _PLAIN[name]
    else:
        field.type = _Field.TYPE_MESSAGE
        known = "google.protobuf.Struct" if name == "Struct" else f"{_PACKAGE}.{name}"
        field.type_name = f".{known}"


def _add_field(message: Any, text: str) -> None:
    kind, name, number = text.split()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    mark, bare = (kind[0], kind[1:]) if kind[0] in "*|%" else ("", kind)
    if mark == "*":
        field.label = _Field.LABEL_REPEATED
    elif mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="choice")
        field.oneof_index = 0
    if mark != "%":
        _set_type(field, bare)
        return
    entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
    entry.options.map_entry = True
    for at, (part, type_name) in enumerate((("key", "string"), ("value", bare)), 1):
        _set_type(entry.field.add(name=part, number=at, label=_Field.LABEL_OPTIONAL), type_name)
    field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
    field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"


def _classes() -> dict[str, Any]:
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
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in found}


_ALL = _classes()
Request: Any = _ALL["ProcessingRequest"]
Response: Any = _ALL["ProcessingResponse"]
