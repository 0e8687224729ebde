"""What things are called in the bucket. Pure.

    v1/<namespace, 64 hex digits>/objects/<id>
    v1/<namespace, 64 hex digits>/manifests/<id>
    v1/<namespace, 64 hex digits>/purges/<id>
    v1/<namespace, 64 hex digits>/pins/<id>

An id sorts by time, so that a listing from a cursor finds what is new. Paths are relative to the
prefix in the URL, which the client adds.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import xxhash

from sglang_tiered.storage.base import NO_TENANT

__all__ = [
    "ID_BYTES",
    "MAX_UNIX_MS",
    "ROOT",
    "Layout",
    "ObjectId",
    "namespace_of",
    "parse_id",
    "parse_path",
    "tenant_tag",
]

ROOT = "v1"
ID_BYTES = 37
MAX_UNIX_MS = (1 << 48) - 1

_ID = re.compile(r"([0-9a-f]{12})-([0-9a-f]{8})-([0-9a-f]{6})-([0-9a-f]{8})")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")


class ObjectId(NamedTuple):
    """The name of an object and its manifest, a purge or a pin. ``unix_ms`` is when the object was
    opened, before its first page was put into it: no page of it was submitted after the object
    was closed, and a purge that was ordered later has a later time (of one writer, always)."""

    unix_ms: int  # 48 bits
    writer: int  # 32 bits, drawn at random by every engine that is opened
    sequence: int  # 24 bits, of the writer
    tenant_tag: int  # 32 bits, see ``tenant_tag``

    def __str__(self) -> str:
        return f"{self.unix_ms:012x}-{self.writer:08x}-{self.sequence:06x}-{self.tenant_tag:08x}"


class Layout(NamedTuple):
    """The paths of one namespace. Folders have no slash at the end."""

    namespace: bytes  # 32 bytes

    @property
    def folder(self) -> str:
        return f"{ROOT}/{self.namespace.hex()}"

    @property
    def objects(self) -> str:
        return f"{self.folder}/objects"

    @property
    def manifests(self) -> str:
        return f"{self.folder}/manifests"

    @property
    def purges(self) -> str:
        return f"{self.folder}/purges"

    @property
    def pins(self) -> str:
        return f"{self.folder}/pins"

    def pin(self, pin_id: ObjectId | str) -> str:
        return f"{self.pins}/{pin_id}"

    def object(self, object_id: ObjectId | str) -> str:
        return f"{self.objects}/{object_id}"

    def manifest(self, object_id: ObjectId | str) -> str:
        return f"{self.manifests}/{object_id}"

    def purge(self, object_id: ObjectId | str) -> str:
        return f"{self.purges}/{object_id}"


def parse_id(name: str) -> ObjectId | None:
    """Return the id that a name spells; None for a foreign name."""
    match = _ID.fullmatch(name)
    return ObjectId(*(int(group, 16) for group in match.groups())) if match else None


def parse_path(path: str) -> ObjectId | None:
    """Return the id at the end of a path; None for a foreign one."""
    return parse_id(path.rpartition("/")[2])


def namespace_of(folder: str) -> bytes | None:
    """Return the namespace whose folder this is; None for a foreign one."""
    root, _, name = folder.rstrip("/").rpartition("/")
    return bytes.fromhex(name) if root == ROOT and _NAMESPACE.fullmatch(name) else None


def tenant_tag(tenant: bytes) -> int:
    """Return what names tell of a tenant: enough to skip others' manifests, too little to be the
    truth. Zero for no tenant."""
    return 0 if tenant == NO_TENANT else int(xxhash.xxh3_64_intdigest(tenant)) & 0xFFFF_FFFF
