"""What several ranks of one server decide alike."""

from __future__ import annotations
