"""The room of each request, on which prefill and decode agree without a message.

A client, as a rule a router, draws one number and sends it with the request to both instances.
SGLang takes it for the room as it is, and gives it to every sample of ``n`` as well. Here the room
is made of the number, of what is asked and of the sample. Every sample has a room of its own, and
two clients who draw the same number meet only if they ask for the same, whose KV is the same too.
That is not relied on: the ends of a room compare digests of their tokens (``tokens_of``).

The room leaves the same remainder as the client's number by every number of replicas up to 16:
SGLang finds a request's replica by it, and so may a router. It is made where a request is
tokenized; what the ends of a handoff are told is of the scheduler's process.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.runtime_context import get_disagg

from sglang_tiered.config import TRANSFER_BACKEND
from sglang_tiered.integration.identity.media_hashes import HASHES
from sglang_tiered.transfer.messages import (
    TOKENS_BYTES,
    Asked,
    is_other_model,
    is_other_prompt,
)

NUM_ROOMS = 2**63
"""A request may name its room by a number from 0 up to this: SGLang's tensors hold no larger one.
"""

_STRIDE = 720720  # the least number that all up to 16 divide
_FIELDS = (
    ("bootstrap_room", int, NUM_ROOMS, "a number from 0 to 2^63 - 1"),
    ("bootstrap_host", str, 0, "the name of a host"),
    ("bootstrap_port", int, 65536, "a port"),
)
_MEDIA = ("image_data", "video_data", "audio_data")


class SampleRooms(int):
    """A client's number until the request is sent. Copies of a tokenized request share it."""

    _asked: Any
    _num_taken: int

    def __new__(cls, number: int, asked: Any) -> SampleRooms:
        """``asked``: a hash of what is asked. It is not changed."""
        made = super().__new__(cls, number)
        made._asked, made._num_taken = asked, 0
        return made

    def take(self) -> int:
        """Return the room of the next sample. SGLang first sends one that fills the caches."""
        asked = self._asked.copy()
        asked.update(self._num_taken.to_bytes(8, "little"))
        self._num_taken += 1
        drawn = int.from_bytes(asked.digest(), "little") % (NUM_ROOMS // _STRIDE)
        return drawn * _STRIDE + int(self) % _STRIDE


def check_rooms(_: Any, request: Any) -> None:
    """Raise ``ValueError``, which SGLang answers with 400, for a request whose prompts do not have
    a prefill instance and a number each. After SGLang has made lists of what a batch shares."""
    problem = next(filter(None, (_problem_of(request, *each) for each in _FIELDS)), None)
    if problem is not None and _is_apart():
        raise ValueError(problem)


def _problem_of(request: Any, name: str, kind: type, limit: int, wanted: str) -> str | None:
    value = getattr(request, name)
    of_each = [value] if request.is_single else value
    if len(of_each) < request.batch_size:
        return (
            f"{name} has {len(of_each)} entries for {request.batch_size} prompts; give one for "
            "each, or a single value for all."
        )
    for one in of_each:
        is_right = type(one) is kind and (not isinstance(one, int) or 0 <= one < limit)
        if one is not None and not is_right:
            return f"{name} must be {wanted} for each prompt, not {str(one)[:80]}."
    if name == "bootstrap_room" and value and not request.is_single:
        named = [one for one in value[: request.batch_size] if one is not None]
        if len(set(named)) < len(named):
            return "bootstrap_room names the same number for two prompts; draw one for each."
    return None


def after_tokenizing(tokenized: Any, request: Any) -> None:
    """Note what a request asks for, of which its rooms are made when it is sent. Raises
    ``ValueError`` for a prompt without a token, which has no KV to hand over: it ends both
    schedulers."""
    number = getattr(tokenized, "bootstrap_room", None)
    if number is None or not _is_apart() or request.bootstrap_host == FAKE_BOOTSTRAP_HOST:
        return
    if tokenized.input_ids is not None and not tokenized.input_ids and not request.session_params:
        raise ValueError("the prompt has no token; prefill and decode need one at least.")
    media = (getattr(request, name) for name in _MEDIA)
    tokenized.bootstrap_room = _rooms_of(number, request.lora_path, media, tokenized.input_ids)


def tokens_of(req: Any) -> bytes:
    """Return the digest of the tokens whose KV is handed over, as both ends make it. On the
    scheduler's thread.

    Of placeholders of media it has the number and place only: what stands for their content may be
    made otherwise on the other device."""
    num_tokens = len(req.origin_input_ids) + len(req.output_ids)
    hashed = hashlib.blake2b(num_tokens.to_bytes(8, "little"), digest_size=TOKENS_BYTES)
    for tokens in (req.origin_input_ids_unpadded, req.output_ids):
        hashed.update(array("q", tokens))
    return hashed.digest()


def _rooms_of(number: int, lora_name: Any, media: Iterable[Any], tokens: Any) -> SampleRooms:
    asked = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8)
    for said in (lora_name, *media):
        for text in _texts_in(said):
            asked.update(len(text).to_bytes(8, "little") + text.encode(errors="replace"))
        asked.update(b"\0")
    if tokens is not None:
        asked.update(tokens)
    return SampleRooms(number, asked)


def before_dispatch(_: Any, message: Any) -> None:
    """Give a request that is sent to the schedulers, or each of a batch, a room of its own."""
    for tokenized in getattr(message, "batch", None) or (message,):
        number = getattr(tokenized, "bootstrap_room", None)
        if isinstance(number, SampleRooms):
            tokenized.bootstrap_room = number.take()


def before_handoff(queue: Any, req: Any, *_: Any, is_rebootstrap: bool = False, **__: Any) -> None:
    """Tell the end of a handoff, which SGLang makes next, which adapter and tokens its request
    has. On the scheduler's thread."""
    if queue.transfer_backend.value != TRANSFER_BACKEND:
        return
    manager = queue.kv_manager
    manager.arriving = Asked(manager.adapters.digest_of(req.lora_id), tokens_of(req))
    manager.recompute = {}
    if is_rebootstrap:
        name = manager.adapters.name_of(req.lora_id)
        manager.recompute = {"bootstrap_room": req.bootstrap_room, "lora_path": name}
        tokens, no_media = (
            array("q", [*req.origin_input_ids, *req.output_ids]),
            [None] * len(_MEDIA),
        )
        # As prefill will make it of the request that decode sends it.
        req.bootstrap_room = _rooms_of(req.bootstrap_room, name, no_media, tokens).take()


def before_abort(req: Any, error_message: str, status_code: Any = None) -> Any:
    """Answer 503 for a pair of unequal models, as another pair may serve the request, and 400 for
    unequal prompts."""
    if is_other_model(error_message):
        status_code = HTTPStatus.SERVICE_UNAVAILABLE
    elif is_other_prompt(error_message):
        status_code = HTTPStatus.BAD_REQUEST
    return (req, error_message, status_code), {}


def _is_apart() -> bool:
    disagg = get_disagg()
    is_alone = disagg.disaggregation_mode == "null"
    return not is_alone and disagg.disaggregation_transfer_backend == TRANSFER_BACKEND


def _texts_in(said: Any) -> Iterator[str]:
    """Yield the strings of a value as JSON gives it, but hashes, which an instance may drop."""
    if isinstance(said, str):
        yield said
    elif isinstance(said, Mapping):
        for name, value in said.items():
            if name not in HASHES:
                yield from _texts_in(value)
    elif isinstance(said, (list, tuple)):
        for value in said:
            yield from _texts_in(value)
    elif hasattr(said, "url"):
        yield from _texts_in(said.url)
