"""POD attention as a backend of SGLang's attention registry."""

from __future__ import annotations
