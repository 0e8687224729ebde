"""What became of the rows of a file: used, repaired, or dropped and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_tiered.errors import TraceError

MOST_DROPPED = 0.1
"""The share of rows beyond which a file is refused."""

_MAX_REASONS = 20  # different ones that are told; what else there was is told as one


class BadRowError(ValueError):
    """A row, or a part of one, that is not what its format says.

    ``reason`` is the same for all rows of its kind, and is what they are counted by; ``detail``
    says what is so in this one.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class _Reason:
    first: str  # the first row of its kind
    count: int = 0


@dataclass
class Tally:
    """Counts of one reading.

    With ``strict``, the first bad row raises ``TraceError``. Otherwise ``check`` raises it where
    more than ``MOST_DROPPED`` of the rows were dropped, unless ``allow_dropped``. A repaired row is
    one that is used without the part of it that no request can be made of. ``notes`` are sentences
    about the whole file that its user should know.
    """

    strict: bool = False
    allow_dropped: bool = False
    num_rows: int = 0
    num_repaired: int = 0
    num_skipped: int = 0
    num_requests: int = 0
    reasons: dict[str, _Reason] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def skip(self, row: str, title: str, error: BadRowError) -> None:
        """Count a row as dropped. ``row`` names it, ``title`` its format."""
        self.num_skipped += 1
        self._count(row, error, f"is not a {title} request", "repair or remove it")

    def repair(self, row: str, error: BadRowError) -> None:
        """Count a row as used in part."""
        self.num_repaired += 1
        self._count(row, error, "is used in part", "repair it")

    def _count(self, row: str, error: BadRowError, what: str, way_out: str) -> None:
        if self.strict:
            raise TraceError(f"{row} {what} ({error}); {way_out}, or read without --strict.")
        reason = error.reason
        if reason not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            reason = "other reasons"
        self.reasons.setdefault(reason, _Reason(row)).count += 1

    def check(self) -> None:
        """Raise ``TraceError`` where so much was dropped that the rest is another trace."""
        if 0 < self.num_rows == self.num_skipped and not self.allow_dropped:
            raise TraceError(
                f"{self._counts()}; none is left: check the file, --format and "
                "--trace-block-tokens."
            )
        if self.num_skipped > MOST_DROPPED * self.num_rows and not self.allow_dropped:
            raise TraceError(
                f"{self._counts()}; that is more than {MOST_DROPPED:.0%} of the file: repair it, "
                "or give --allow-dropped."
            )

    def summary(self) -> str | None:
        """One sentence when something was not used, else ``None``."""
        return f"{self._counts()}." if self.reasons else None

    def _counts(self) -> str:
        parts = []
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} of {self.num_rows:,} rows dropped")
        if self.num_repaired:
            parts.append(f"{self.num_repaired:,} used in part")
        by_count = sorted(self.reasons.items(), key=lambda item: -item[1].count)
        listed = ", ".join(
            f"{found.count:,} as {reason} (the first: {found.first})" for reason, found in by_count
        )
        return f"{' and '.join(parts)}: {listed}"
