"""The front of a cluster: Envoy, and the picker that tells it which server a request goes to."""

from __future__ import annotations
