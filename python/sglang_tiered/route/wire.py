"""Messages of Envoy's external processing, those fields of its v3 interface that a picker needs.

The numbers are Envoy's, and v3 is frozen; fields that are not here are passed over. The interface's
own package of stubs owns files of other packages, so it is not used. Names as in Envoy's
``ext_proc/v3/external_processor.proto``.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

__all__ = ["FULL_DUPLEX", "METHOD", "SERVICE", "Request", "Response", "Struct"]

SERVICE, METHOD = "envoy.service.ext_proc.v3.ExternalProcessor", "Process"
FULL_DUPLEX = 4
"""Of ``request_body_mode``: the body is streamed through."""

_PACKAGE = "sglang_tiered.route"
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
