"""Each request seen whole: notes of it, its line in a file, its spans in a trace."""

from __future__ import annotations
