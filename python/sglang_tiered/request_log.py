"""The line of JSON that tells one request's story (``RequestRecord``), and the file to which a
server writes it (``--tier-log-requests``).

A server assembles it (``integration.observe``), ``sglang-tiered explain`` reads it, and
``docs/openapi.json`` has the descriptions here. Nothing in it is of a prompt's text, tokens or
keys; a tenant is its digest.

A field whose name ends in ``at_s`` is a moment, in seconds after the request arrived at the
scheduler; another ``_s`` is a duration. A field that has its default is left out of the line. A
change of what a field means, or of its name, is another ``VERSION``; a new field is not.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import FILE, Flag, MiB, format_bytes, size

DEFAULT_MAX_BYTES = 256 * MiB
MIN_MAX_BYTES = MiB
"""A line takes about 1.5 kB; below this, files would replace each other within seconds."""

_MODE = 0o600


VERSION = 1

NO_TIME = 0.0
"""The default of durations: msgspec leaves out what is this very object."""

MAX_RID = 256
"""Characters of a request's id that are kept. Clients choose ids, of any length."""

_ONE_WORD = msgspec.Meta(le=(1 << 63) - 1)
"""Of a figure that is divided: a line may hold an integer of any length."""

Decision = Literal["load", "truncated", "declined", "absent"]
Why = Literal["ranks", "window", "stores", "copies", "load", "others", "back"]
Cause = Literal["late", "deadline", "turn", "tier", "refused", "no_host_path", "revoked"]


class RequestLogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where lines go. Of several replicas (``--dp-size``) each has a file of its own."""

    path: Annotated[
        str,
        Flag(
            "--tier-log-requests",
            FILE,
            "File to which a line of JSON is added for each request that ends: where its tokens "
            "came from, what was planned at which price, and what it waited for. With `--dp-size` "
            "or `--attn-dp-size` above 1 each replica writes `FILE.replicaN`.",
            default="none",
        ),
    ]
    max_bytes: Annotated[
        int,
        Flag(
            "tier-log-requests-bytes",
            size("drop --tier-log-requests to write nothing"),
            "Size at which the file of `--tier-log-requests` is renamed to `FILE.1`, in the place "
            "of the one before, so that both take at most twice that.",
            default="256MiB",
        ),
    ] = DEFAULT_MAX_BYTES
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.max_bytes < MIN_MAX_BYTES:
            raise ConfigError(
                f"tier-log-requests-bytes {self.max_bytes} must be at least "
                f"{format_bytes(MIN_MAX_BYTES)}; raise it or drop it."
            )

    def file_of(self, replica: int) -> Path:
        """Return the file of a replica."""
        return Path(self.path if self.num_replicas == 1 else f"{self.path}.replica{replica}")

    def check(self) -> None:
        """Raise ``ConfigError`` if the file cannot be written. Creates it."""
        path = self.file_of(0)
        try:
            os.close(open_log(path))
            if not os.access(path.parent, os.W_OK):
                raise OSError(errno.EACCES, "its directory does not let it be renamed")
            if older(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as error:
            is_link = error.errno == errno.ELOOP
            why = "it is a symbolic link" if is_link else (error.strerror or str(error))
            raise ConfigError(
                f"--tier-log-requests {path} cannot be written ({why}); name a file in a "
                "directory that exists and this user may write to, or drop it."
            ) from error


def older(path: Path) -> Path:
    """Return the file that holds the lines before those of ``path``."""
    return path.with_name(path.name + ".1")


def open_log(path: Path) -> int:
    """Open a file to append to, for its owner only; create it if it is missing. Returns the
    descriptor. Raises ``OSError``, for another user's file too, who could read it, and for what is
    no ordinary file: a pipe would wait for its reader."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, _MODE)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no ordinary file")
        if found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it belongs to another user")
        if stat.S_IMODE(found.st_mode) != _MODE:
            os.fchmod(descriptor, _MODE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def rid_of(rid: str) -> str:
    """Return an id as it stands in a line: its begin, and what UTF-8 cannot say escaped."""
    return rid[:MAX_RID].encode(errors="backslashreplace").decode()


def _is(description: str) -> msgspec.Meta:
    return msgspec.Meta(description=description)


class _Part(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a line, which a server fills in while the request lives."""


class Sources(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the tokens of the prompt came from; together they are all of it."""

    num_device: Annotated[int, _is("found in device memory")] = 0
    num_host: Annotated[int, _is("copied from host memory, where they were before it came")] = 0
    num_nvme: Annotated[int, _is("loaded from NVMe")] = 0
    num_object: Annotated[int, _is("loaded from the object tier")] = 0
    num_peer: Annotated[int, _is("loaded from other servers")] = 0
    num_computed: Annotated[int, _is("computed")] = 0


class Lookup(_Part, kw_only=True):
    """The last lookup before it was admitted."""

    at_s: Annotated[float, _is("when the tiers were asked")]
    lookup_s: Annotated[float, _is("hashing the pages of the prompt and asking the index")]
    num_lookups: Annotated[int, _is("lookups: a load that waits its turn is looked up again")] = 1
    page_tokens: Annotated[int, _is("tokens of a page")]
    num_memory_tokens: Annotated[int, _is("leading tokens in device and host memory")] = 0
    num_nvme_pages: Annotated[int, _is("further pages that come from NVMe")] = 0
    num_object_pages: Annotated[int, _is("further pages that come from the object tier")] = 0
    num_peer_pages: Annotated[int, _is("further pages that come from other servers")] = 0


class Plan(_Part, kw_only=True):
    """What was planned, all ranks together, at the prices of that moment."""

    at_s: Annotated[float, _is("when it was planned")]
    decision: Annotated[
        Decision,
        _is(
            "`load`: all that the tiers held; `truncated`: a part of it; `declined`: nothing, as "
            "computing was expected to be sooner; `absent`: the tiers held nothing"
        ),
    ]
    num_nvme_tokens: Annotated[int, _is("to load from NVMe")] = 0
    num_object_tokens: Annotated[int, _is("to load from the object tier")] = 0
    num_peer_tokens: Annotated[int, _is("to load from other servers")] = 0
    is_both_ends: Annotated[bool, _is("the front was computed while the back was loaded")] = False
    load_s: Annotated[float, _is("expected for that load, with the loads ahead of it")] = NO_TIME
    held_load_s: Annotated[float, _is("expected for a load of all that the tiers held")] = NO_TIME
    held_prefill_s: Annotated[float, _is("expected for computing what the tiers held")] = NO_TIME
    prefill_all_s: Annotated[float, _is("expected for computing all that memory lacked")] = NO_TIME
    prefill_rest_s: Annotated[float, _is("expected for computing what the load leaves")] = NO_TIME
    queue_wait_s: Annotated[float, _is("expected wait for the admission")] = NO_TIME
    num_tokens_ahead: Annotated[int, _is("tokens of other loads under way")] = 0


class Wait(_Part, kw_only=True):
    """A time in which the request was next, and did not start."""

    why: Annotated[
        Why,
        _is(
            "`load`: its load ran; put off as the `window` of loads was full, as `stores` had to "
            "leave host memory first, as `copies` of what comes before had to be made, or until "
            "the other `ranks` had answered; `back`: its front was computed, and its back still to "
            "come; `others`: something else"
        ),
    ]
    at_s: Annotated[float, _is("when it began")]
    wait_s: Annotated[float, _is("how long it took")]


class TierLoad(_Part, kw_only=True):
    """What was read from one tier for it."""

    tier: Annotated[str, _is("`nvme`, `object` or `peer`")]
    at_s: Annotated[float, _is("when the first read began")]
    read_s: Annotated[float, _is("until the last read had ended, checked")]
    num_reads: Annotated[int, _is("reads that were asked for")]
    num_bytes: Annotated[int, _is("bytes that arrived, checked"), _ONE_WORD] = 0
    expected_s: Annotated[float, _is("expected for these bytes as it was planned")] = NO_TIME
    verify_s: Annotated[
        float, _is("checking pages of NVMe, in all threads together; a part of the reading")
    ] = NO_TIME
    failed: Annotated[
        dict[str, int],
        _is("pages that did not arrive, by reason: `miss`, `corrupt`, `io_error`, `cancelled`"),
    ] = {}


class GivenUp(_Part, kw_only=True):
    """Why it started without what was to be loaded."""

    why: Annotated[
        Cause,
        _is(
            "`late`: computing the rest was sooner by then; `deadline`: with `--tier-load "
            "always`, SGLang's was over; `turn`: it gained nothing by its turn; `tier`: the tier "
            "stopped serving; `refused`: SGLang took no load, for lack of host memory; "
            "`no_host_path`: what comes before has no host copy; `revoked`: SGLang let go of it "
            "before it read anything"
        ),
    ]
    at_s: Annotated[float, _is("when")]
    num_tokens: Annotated[int, _is("tokens that had not arrived")] = 0


class Load(_Part, kw_only=True):
    """The load: from the first of its parts to the last."""

    at_s: Annotated[float, _is("when it was queued")]
    load_s: Annotated[float | None, _is("until it had ended, or was given up")] = None
    num_tokens: Annotated[int, _is("tokens that were to be loaded")] = 0
    num_loaded_tokens: Annotated[int, _is("tokens that arrived in host memory")] = 0
    tiers: Annotated[tuple[TierLoad, ...], _is("by tier")] = ()


class Copy(_Part, kw_only=True):
    """The copy from host to device memory."""

    at_s: Annotated[float, _is("when it was asked for")]
    copy_s: Annotated[
        float | None,
        _is(
            "until it was done, at the latest: on a CPU until its batch began, elsewhere, where a "
            "batch runs beside it, until that had ended"
        ),
    ] = None
    num_tokens: Annotated[int, _is("tokens")]
    num_bytes: Annotated[int, _is("bytes, estimated for models with more than one pool")] = 0


class Prefill(_Part, kw_only=True):
    """The batches that computed its prompt, with whatever other requests were in them."""

    at_s: Annotated[float, _is("when the first of them ended")]
    prefill_s: Annotated[float, _is("how long they took, copies they waited for included")]
    others_s: Annotated[
        float, _is("prefill batches of other requests between its admission and its first token")
    ] = NO_TIME
    num_batches: Annotated[int, _is("batches")]
    num_tokens: Annotated[int, _is("tokens of this request that they computed")]


class RequestRecord(_Part, kw_only=True):
    """One request."""

    v: Annotated[int, _is("version of the format, 1")]
    rid: Annotated[
        str, _is("the request's id, as in SGLang's answers and logs; of a long one the begin")
    ]
    arrived_unix_s: Annotated[float, _is("when it reached the scheduler, in seconds since 1970")]
    replica: Annotated[int, _is("the replica of `--dp-size` that served it")] = 0
    tenant: Annotated[str, _is("digest of `extra_key` and `cache_salt`; without both, none")] = ""
    end: Annotated[str, _is("SGLang's reason for its end: `stop`, `length`, `abort`, ...")]
    num_prompt_tokens: Annotated[int, _is("tokens of the prompt")]
    num_output_tokens: Annotated[int, _is("tokens of the answer")] = 0
    num_retractions: Annotated[int, _is("times that it had to give its memory back")] = 0
    num_ahead: Annotated[int, _is("requests that waited when it came")] = 0
    num_running: Annotated[int, _is("requests in the last batch then")] = 0
    admitted_s: Annotated[float | None, _is("until its first batch; none if it never ran")] = None
    first_token_s: Annotated[float | None, _is("until its first token")] = None
    total_s: Annotated[float, _is("until its end")]
    tokens: Annotated[Sources, _is("where its tokens came from")] = Sources()
    lookup: Annotated[Lookup | None, _is("what the tiers held")] = None
    plan: Annotated[Plan | None, _is("what was to be loaded, and the prices")] = None
    waits: Annotated[
        tuple[Wait, ...],
        _is("what it waited for in its turn; the rest of `admitted_s` is queue"),
    ] = ()
    load: Annotated[Load | None, _is("what was loaded")] = None
    given_up: Annotated[GivenUp | None, _is("why it did not get all of that")] = None
    copy: Annotated[Copy | None, _is("what was copied to the device")] = None
    prefill: Annotated[Prefill | None, _is("what was computed of the prompt")] = None
