"""The only package that imports sglang. Import its modules by name; this file stays empty."""

from __future__ import annotations
