"""What stands above several servers: today the plan of how many to run, of what, in which roles."""

from __future__ import annotations
