"""What became of the rows of a file: used, repaired, or skipped and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_tiered.errors import TraceError

__all__ = ["BadRowError", "Tally"]

_MAX_REASONS = 5


class BadRowError(ValueError):
    """A row that is not what its format says; the message goes into "not a request (...)"."""


@dataclass
class Tally:
    """Counts of one reading. With ``strict``, the first bad row raises ``TraceError`` instead.

    A repaired row is one that is used without the part of it that no request can be made of.
    """

    strict: bool = False
    num_rows: int = 0
    num_repaired: int = 0
    num_skipped: int = 0
    num_requests: int = 0
    reasons: list[str] = field(default_factory=list)  # of the first few bad rows, a sentence each

    def skip(self, sentence: str) -> None:
        """Count a row as skipped. ``sentence`` has no full stop and names the row."""
        self.num_skipped += 1
        self._note(sentence, "repair or remove it")

    def repair(self, sentence: str) -> None:
        """Count a row as used in part."""
        self.num_repaired += 1
        self._note(sentence, "repair it")

    def _note(self, sentence: str, way_out: str) -> None:
        if self.strict:
            raise TraceError(f"{sentence}; {way_out}, or read without --strict.")
        if len(self.reasons) < _MAX_REASONS:
            self.reasons.append(sentence)

    def summary(self) -> str | None:
        """One sentence when something was not used, else ``None``."""
        if not self.num_skipped and not self.num_repaired:
            return None
        parts = []
        if self.num_skipped:
            parts.append(f"{self.num_skipped:,} of {self.num_rows:,} rows skipped")
        if self.num_repaired:
            parts.append(f"{self.num_repaired:,} used in part")
        return f"{' and '.join(parts)}; the first: {self.reasons[0]}."
