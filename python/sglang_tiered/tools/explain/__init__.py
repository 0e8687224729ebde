"""Why was this request slow? Read from the lines that a server writes of its requests."""

from __future__ import annotations
