"""Pure decisions: no I/O, no threads, the clock is passed in."""

from __future__ import annotations
