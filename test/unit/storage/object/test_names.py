"""Names sort by time, say whose they are, and refuse every foreign name."""

from __future__ import annotations

import random

import pytest

from sglang_tiered.storage.base import NO_TENANT
from sglang_tiered.storage.object.names import (
    ID_BYTES,
    MAX_UNIX_MS,
    Layout,
    ObjectId,
    namespace_of,
    parse_id,
    parse_path,
    tenant_tag,
)

ID = ObjectId(0x18BCFE56800, 0xDEADBEEF, 7, 0x22)
NAME = "018bcfe56800-deadbeef-000007-00000022"
LAYOUT = Layout(b"\x11" * 32)


def test_an_id_comes_back_from_its_name() -> None:
    assert str(ID) == NAME
    assert len(NAME) == ID_BYTES
    assert parse_id(NAME) == ID
    assert parse_path(LAYOUT.manifest(ID)) == ID


def test_names_sort_as_ids_do() -> None:
    source = random.Random(1)
    ids = [
        ObjectId(source.randrange(1 << 44), source.randrange(4), source.randrange(9), 0)
        for _ in range(200)
    ]
    assert [str(i) for i in sorted(ids)] == sorted(str(i) for i in ids)
    assert parse_id(str(ObjectId(MAX_UNIX_MS, 2**32 - 1, 2**24 - 1, 2**32 - 1)))


@pytest.mark.parametrize(
    "name",
    ["", NAME[:-1], NAME + "0", NAME.upper(), NAME.replace("-", "_"), "../" + NAME, NAME + "\n"],
)
def test_a_name_that_is_not_ours_is_nothing(name: str) -> None:
    assert parse_id(name) is None


def test_paths_of_a_namespace() -> None:
    folder = "v1/" + "11" * 32
    assert LAYOUT.object(ID) == f"{folder}/objects/{NAME}"
    assert LAYOUT.manifest(NAME) == f"{folder}/manifests/{NAME}"
    assert LAYOUT.purge(ID) == f"{folder}/purges/{NAME}"
    assert namespace_of(folder) == namespace_of(folder + "/") == LAYOUT.namespace
    assert namespace_of("v2/" + "11" * 32) is None
    assert namespace_of("v1/elsewhere") is None


def test_tags_part_tenants_and_tell_no_name() -> None:
    tenants = [bytes([i]) * 16 for i in range(1, 200)]
    assert len({tenant_tag(tenant) for tenant in tenants}) == len(tenants)
    assert tenant_tag(NO_TENANT) == 0
    assert b"".join(tenants[0:1]).hex()[:8] != f"{tenant_tag(tenants[0]):08x}"
