"""What a person runs beside a server."""

from __future__ import annotations
