"""What prefills take, known and measured, and how long requests wait for their admission."""

from __future__ import annotations
