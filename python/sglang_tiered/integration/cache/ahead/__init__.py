"""What is loaded to host memory before a request asks for it."""

from __future__ import annotations
