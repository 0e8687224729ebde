"""Objects and manifests put into a bucket by hand, beside any engine, and a look at the rest."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from object_server import CREDENTIALS, REGION
from obstore.store import LocalStore, S3Store

from kit.runs import NAMESPACE
from sglang_tiered.storage.base import KEY_BYTES, NO_TENANT
from sglang_tiered.storage.object.client import open_client
from sglang_tiered.storage.object.format import (
    Manifest,
    Purge,
    pack_manifest,
    pack_purge,
    pack_tail,
    page_checksum,
    page_table,
    unpack_manifest,
)
from sglang_tiered.storage.object.names import Layout, ObjectId, tenant_tag
from sglang_tiered.storage.object.settings import ObjectSettings

if TYPE_CHECKING:
    from pathlib import Path

    from object_server import ObjectServer
    from obstore.store import ObjectStore

    from sglang_tiered.storage.object.client import ObjectClient

__all__ = ["Bucket"]


@dataclass
class Bucket:
    """One namespace of a store, as a writer leaves it. ``opened_ms`` is the time in the names."""

    store: ObjectStore  # for the tests
    client: ObjectClient  # for what is tested
    directory: Path | None = None
    layout: Layout = field(default_factory=lambda: Layout(NAMESPACE))
    opened_ms: int = 1_790_000_000_000
    sequence: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    @classmethod
    def in_directory(cls, path: Path) -> Bucket:
        client = open_client(ObjectSettings(url=path.as_uri()))
        return cls(LocalStore(path, mkdir=True), client, path)

    @classmethod
    def in_s3(cls, server: ObjectServer, bucket: str) -> Bucket:
        """The client goes where the environment says, the tests' own look to the server."""
        store = S3Store(
            bucket,
            prefix="tier",
            endpoint=server.url,
            region=REGION,
            access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            client_options={"allow_http": True, "timeout": "10s"},
        )
        return cls(store, open_client(ObjectSettings(url=f"s3://{bucket}/tier")))

    def make(
        self,
        *,
        tenant: bytes = NO_TENANT,
        page_bytes: int = 1000,
        num_pages: int = 2,
        announced: bool = True,
        uploaded: bool = True,
    ) -> str:
        """An object with its manifest, or one of the two; returns its id."""
        self.sequence += 1
        self.opened_ms += 1
        object_id = ObjectId(self.opened_ms, 7, self.sequence, tenant_tag(tenant))
        rows, payload = [], b""
        for _ in range(num_pages):
            key, data = self.random.randbytes(KEY_BYTES), self.random.randbytes(page_bytes)
            checksum = page_checksum(self.layout.namespace, key, (memoryview(data),))
            rows.append((key, len(payload), page_bytes, page_bytes, checksum))
            payload += data
        pages = page_table(rows)
        manifest = Manifest(object_id, self.layout.namespace, tenant, "none", pages, len(payload))
        packed = pack_manifest(manifest)
        if uploaded:
            self.store.put(self.layout.object(object_id), payload + packed + pack_tail(num_pages))
        if announced:
            self.store.put(self.layout.manifest(object_id), packed)
        return str(object_id)

    def purge(self, tenant: bytes | None, bound_ms: int) -> str:
        self.sequence += 1
        self.opened_ms += 1
        purge_id = ObjectId(self.opened_ms, 7, self.sequence, tenant_tag(tenant or NO_TENANT))
        data = pack_purge(Purge(self.layout.namespace, tenant, bound_ms))
        self.store.put(self.layout.purge(purge_id), data)
        return str(purge_id)

    def forget(self, keys: tuple[bytes, ...], bound_ms: int) -> str:
        """A tombstone of single pages; returns its id."""
        self.sequence += 1
        purge_id = ObjectId(bound_ms, 7, self.sequence, 0)
        data = pack_purge(Purge(self.layout.namespace, None, bound_ms, keys))
        self.store.put(self.layout.purge(purge_id), data)
        return str(purge_id)

    def keys_of(self, name: str) -> tuple[bytes, ...]:
        """The keys of an object that is announced."""
        manifest = unpack_manifest(self.client.get(self.layout.manifest(name)))
        assert manifest is not None
        return tuple(bytes(key) for key in manifest.pages["key"])

    def objects(self) -> set[str]:
        return self._names(self.layout.objects)

    def manifests(self) -> set[str]:
        return self._names(self.layout.manifests)

    def purges(self) -> set[str]:
        return self._names(self.layout.purges)

    def rest(self) -> set[str]:
        """Paths of everything else in the namespace."""
        known = (self.layout.objects, self.layout.manifests, self.layout.purges)
        return {
            meta["path"]
            for chunk in self.store.list(self.layout.folder)
            for meta in chunk
            if not meta["path"].startswith(known)
        }

    def _names(self, folder: str) -> set[str]:
        listed = (meta for chunk in self.store.list(folder) for meta in chunk)
        return {meta["path"].rpartition("/")[2] for meta in listed}
