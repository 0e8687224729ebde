"""What was erased: what is dead in the log, by tenant and by page."""

from __future__ import annotations
