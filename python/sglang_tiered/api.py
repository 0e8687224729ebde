"""Every ``/tier`` call, declared once: how it is asked, what it takes, and what it answers.

The HTTP endpoints, ``sglang_tiered.client``, ``Engine`` and ``docs/openapi.json`` follow ``CALLS``.
``decode`` reads a body, in which nothing is trusted. Imports neither torch nor SGLang.
"""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from sglang_tiered.policy.server_costs import ServerCosts
from sglang_tiered.request_log import RequestRecord, Sources

MAX_TOKENS = 1 << 22
_MAX_NAME_BYTES = 512  # of pins and conversations: their characters may be longer
_MAX_CURSOR = 1 << 18  # characters: a name for each data-parallel rank


class CallError(ValueError):
    """Raised for a call that is refused. Its text is one sentence.

    status: 400 what the caller sent, 404 what is not known, 409 beyond a bound. 500 a failure in a
    scheduler, 503 what may go well if it is asked again.
    """

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


def _is(description: str, **bounds: Any) -> Meta:
    return Meta(description=description, **bounds)


def _one_of(description: str, *values: Any) -> Meta:
    """Of an answer a client of an earlier version may read other values."""
    return Meta(description=description, extra_json_schema={"enum": list(values)})


# ---- What calls answer ----

_Tier = Annotated[str, _one_of("where the pages are", "nvme", "object")]
_PinName = Annotated[str, _is("the pin's name")]
_Until = Annotated[float | None, _is("Unix time in seconds; null until it is unpinned")]
_LastUsed = Annotated[float | None, _is("Unix time in seconds; null where it is not known")]
_Next = Annotated[str | None, _is("what after= takes for the next page; null on the last")]


class Checkpoint(msgspec.Struct, frozen=True):
    """Tokens of the prefix that are durable in ``tier``, and those that are not."""

    tier: _Tier
    num_tokens: int
    num_missing: Annotated[int, _is("tokens of the prefix that are not durable there")]


class Pin(Checkpoint, frozen=True):
    """Of what is kept as well."""

    name: _PinName
    pinned_until: _Until = None


class Unpinned(msgspec.Struct, frozen=True):
    """Whether the pin is gone from every tier."""

    unpinned: bool


class Residency(msgspec.Struct, frozen=True):
    """Tokens of the prefix, and how many leading ones each tier holds by itself."""

    num_tokens: int
    device: Annotated[int, _is("leading tokens in device memory")]
    host: Annotated[int, _is("leading tokens in host memory")]
    nvme: Annotated[int, _is("leading tokens on NVMe")] = 0
    object: Annotated[int, _is("leading tokens in the bucket")] = 0
    peer: Annotated[int, _is("leading tokens that other servers hold")] = 0


class ConversationPin(msgspec.Struct, frozen=True):
    """A pin of one conversation."""

    name: _PinName
    tier: _Tier
    bytes: Annotated[int, _is("bytes that this pin keeps")]
    pinned_until: _Until = None


class Conversation(Residency, frozen=True, kw_only=True):
    """A conversation with its newest prefix."""

    id: str | None = None
    rid: str | None = None
    last_used: _LastUsed = None
    pins: tuple[ConversationPin, ...] = ()


class ConversationPage(msgspec.Struct, frozen=True):
    """Some of a tenant's conversations. ``pin_bound_bytes`` is what all pins of the server together
    may take."""

    conversations: tuple[Conversation, ...]
    next: _Next = None
    pinned_bytes: int = 0
    pin_bound_bytes: int = 0


class Prefetch(msgspec.Struct, frozen=True):
    """Tokens of the prefix, those in device or host memory, and those on their way there."""

    num_tokens: int
    num_in_memory: Annotated[int, _is("leading tokens in device or host memory")]
    num_loading: Annotated[int, _is("tokens that are being loaded")]


class Forgotten(msgspec.Struct, frozen=True):
    """Tokens whose pages are gone."""

    durable: bool
    num_tokens: int


class Purge(msgspec.Struct, frozen=True):
    """Whether the pages are gone, also after a crash."""

    durable: bool
    in_memory: Annotated[str, _one_of("hidden: gone once no request is left", "gone", "hidden")]


class TenantUsage(msgspec.Struct, frozen=True):
    """What a tenant (a digest of its keys, in hex) has on NVMe."""

    tenant: str
    num_pages: int
    stored_bytes: int
    physical_bytes: int


class LoggedRequest(RequestRecord, kw_only=True):
    """A line of ``--tier-log-requests``, and why it took as long as it did."""

    why: str


class LastMinute(Sources, frozen=True, kw_only=True, omit_defaults=False):
    """Where the prompt tokens came from of the requests that ended in the last minute.
    ``is_whole`` is false where that minute has more lines than are read."""

    num_requests: int
    is_whole: bool


class NewestRequests(msgspec.Struct, frozen=True):
    """The newest requests that have ended, and the last minute."""

    requests: tuple[LoggedRequest, ...]
    minute: LastMinute


# ---- The calls, and what they take ----

DurableTier = Literal["nvme", "object"]
_Text = Annotated[str, Meta(min_length=1)]
_Key = Annotated[_Text, _is("the tenant's, as its requests carry it")] | UnsetType
_Rid = Annotated[_Text, _is("id of a request that has ended; prompt and answer")] | UnsetType
_Name = Annotated[_Text, _is("at most 512 bytes of UTF-8", max_length=512)] | UnsetType
_PREFIX = "the prefix, or its beginning"
_Prompt = Annotated[_Text, _is(_PREFIX, max_length=4 * MAX_TOKENS)] | UnsetType
_Token = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Tokens = Annotated[list[_Token], _is(_PREFIX, min_length=1, max_length=MAX_TOKENS)]
_Limit = Annotated[int, _is("how many at most, from 1 to 1,000", ge=1, le=1000)]
_After = Annotated[_Text, _is("what an answer gave as next", max_length=_MAX_CURSOR)] | UnsetType
_Ttl = Annotated[float, _is("seconds; without it until it is unpinned", gt=0, le=3650 * 86_400)]
_Where = Annotated[DurableTier, _is("nvme or object; without it the bucket if there is one")]
_Keeper = Annotated[DurableTier, _is("nvme or object")]
_Wait = Annotated[float, _is("seconds to wait for it before the answer", ge=0, le=30)]
_Keep = Annotated[int, _is("leading tokens that stay", ge=0, le=MAX_TOKENS)]
_All = Annotated[bool, Meta(description="everybody's", extra_json_schema={"const": True})]


class Call(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One call. A subclass says what it does; its fields are the body, or the query of a ``GET``.
    Where they do not go together it raises ``ValueError`` with a sentence, and ``rules`` says the
    same in JSON Schema."""

    path: ClassVar[str] = ""
    answer: ClassVar[Any] = None
    method: ClassVar[str] = "POST"
    statuses: ClassVar[tuple[int, ...]] = (400, 404, 500, 503)
    """Those beside 200 that it answers."""

    @classmethod
    def rules(cls) -> dict[str, Any]:
        return {}


class _OfTenant(Call):
    """Whose pages."""

    extra_key: _Key = UNSET
    cache_salt: _Key = UNSET


class _OfPrefix(_OfTenant):
    """A prefix by one of these names."""

    names: ClassVar[tuple[str, ...]] = ("rid", "conversation_id", "text", "input_ids")

    rid: _Rid = UNSET
    conversation_id: _Name = UNSET
    text: _Prompt = UNSET
    input_ids: _Tokens | UnsetType = UNSET

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not UNSET for name in self.names) != 1:
            raise ValueError(f"pass exactly one of {', '.join(self.names)}")

    @classmethod
    def rules(cls) -> dict[str, Any]:
        return {"oneOf": [{"required": [name]} for name in cls.names]}


class CheckpointCall(_OfPrefix):
    """Make a prefix durable; 503 counts what is not yet."""

    path, answer = "/tier/checkpoint", Checkpoint

    tier: _Where | UnsetType = UNSET


class ResidencyCall(_OfPrefix):
    """Count the leading tokens of a prefix by tier."""

    path, answer = "/tier/residency", Residency


class PinCall(_OfPrefix):
    """Keep a prefix in a tier; 503 counts what is not durable yet."""

    path, answer, statuses = "/tier/pin", Pin, (400, 404, 409, 500, 503)

    name: _Name = UNSET
    ttl: _Ttl | UnsetType = UNSET
    tier: _Keeper = "nvme"


class UnpinCall(_OfPrefix):
    """Let a pin go, by its name or its prefix."""

    path, answer, names = "/tier/unpin", Unpinned, ("name", *_OfPrefix.names)

    name: _Name = UNSET


class PrefetchCall(_OfPrefix):
    """Bring a prefix that is about to be used to host memory; 202 while that goes on."""

    path, answer, statuses = "/tier/prefetch", Prefetch, (202, 400, 404, 500, 503)

    wait_s: _Wait = 0


class ForgetCall(_OfPrefix):
    """Remove what lies behind the first tokens of a prefix from every tier and server."""

    path, answer = "/tier/forget", Forgotten

    keep_tokens: _Keep = 0


class PurgeCall(_OfTenant):
    """Remove all pages of a tenant, or of everybody, from every tier and server."""

    path, answer, statuses = "/tier/purge", Purge, (400, 500, 503)

    all: _All | UnsetType = UNSET

    def __post_init__(self) -> None:  # an empty body must not purge everything
        is_tenant = self.extra_key is not UNSET or self.cache_salt is not UNSET
        if (self.all is True) == is_tenant or self.all is False:
            raise ValueError('pass extra_key, cache_salt or both, or "all": true alone')

    @classmethod
    def rules(cls) -> dict[str, Any]:
        everybody = {"required": ["all"], "maxProperties": 1}
        return {"oneOf": [everybody, {"minProperties": 1, "not": {"required": ["all"]}}]}


class TenantsCall(Call):
    """List the tenants with most on NVMe, for each scheduler."""

    path, answer, method = "/tier/tenants", list[list[TenantUsage]], "GET"
    statuses = (400, 500, 503)

    limit: _Limit = 100


class ConversationsCall(_OfTenant):
    """List a tenant's conversations, a page at a time."""

    path, answer, method = "/tier/conversations", ConversationPage, "GET"
    statuses = (400, 500, 503)

    limit: _Limit = 100
    after: _After = UNSET


class CostsCall(Call):
    """What computing and loading cost here, and how busy the server is."""

    path, answer, method = "/tier/costs", ServerCosts, "GET"
    statuses = (400, 404, 503)


class RequestsCall(Call):
    """List the newest requests that have ended, and the sources of the last minute's tokens."""

    path, answer, method = "/tier/requests", NewestRequests, "GET"
    statuses = (400, 404, 503)

    limit: _Limit = 20


CALLS: tuple[type[Call], ...] = (
    *(CheckpointCall, ResidencyCall, PinCall, UnpinCall, PrefetchCall, ForgetCall, PurgeCall),
    *(TenantsCall, ConversationsCall, CostsCall, RequestsCall),
)


# ---- How a body is read ----


def decode(call: type[Call], body: Any) -> Call:
    """Return a call with its body, or its query, whose values are texts. Raises ``CallError``."""
    fields = call.__struct_fields__
    if not isinstance(body, dict):
        raise CallError(f"the body must be a JSON object of {', '.join(fields)}")
    if unknown := sorted(body.keys() - {*fields}):
        raise CallError(f"{shown(unknown[0])} is unknown here; pass {', '.join(fields)}")
    for name, value in body.items():
        if isinstance(value, str):
            _check_text(name, value)
    try:
        return msgspec.convert(body, call, strict=call.method != "GET")
    except UnicodeEncodeError:
        raise CallError("input_ids has a text; pass a list of token numbers") from None
    except msgspec.ValidationError as error:
        found = re.fullmatch(r"(Expected )?(.*) - at `\$\.(\w+)[^`]*`", str(error), re.DOTALL)
        if found is None:  # a sentence of the call's own
            raise CallError(str(error)) from None
        expected, name = found[2].replace("`", ""), found[3]
        means = msgspec.json.schema(call)["$defs"][call.__name__]["properties"][name]["description"]
        why = f" (expected {expected})" if found[1] else ""  # else it quotes the value, all of it
        raise CallError(f"{name} {shown(body[name])} is refused{why}; pass {means}") from None


def shown(value: Any) -> str:
    """Return the beginning of a value, and how long it is where that is not seen."""
    try:
        found = reprlib.repr(value)
    except ValueError:  # Python prints no number of more than 4,300 digits
        return "of too many digits"
    is_cut = isinstance(value, (str, list)) and "..." in found
    return f"{found} of length {len(value)}" if is_cut else found


def _check_text(name: str, value: str) -> None:
    """Refuse what UTF-8 cannot say, and names with too many bytes. Raises ``CallError``."""
    try:
        num_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise CallError(
            f"{name} has half of a surrogate pair at character {error.start}; pass the whole "
            "character"
        ) from None
    if name in ("name", "conversation_id") and num_bytes > _MAX_NAME_BYTES:
        raise CallError(f"{name} has {num_bytes} bytes, more than {_MAX_NAME_BYTES}; shorten it")
