"""What prefills take, known and measured."""

from __future__ import annotations
