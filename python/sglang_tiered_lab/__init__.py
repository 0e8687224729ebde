"""The laboratory: recorded workloads, replays and clusters in simulation. It may import the server
package; nothing of the server imports it, and its commands are imported when they are typed."""

from __future__ import annotations
