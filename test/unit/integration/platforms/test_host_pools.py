"""SGLang's own host pools through the store: device, host, disk, restart, host, device; bit exact.

One pool of each kind that a model family brings. What cannot be run as a server without a GPU
(Mamba-2 states, a draft model's KV) is covered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_pools import LAYOUT, PAGE, PAGES, extent, hashes, heads_pools, latent_pools
from page_calls import load_pages, store_pages
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from storages import Storages

from sglang_tiered.codecs import make_codec
from sglang_tiered.errors import ConfigError
from sglang_tiered.flags import MiB
from sglang_tiered.integration.cache.host_size import target_host_bytes
from sglang_tiered.integration.storage.backend import TieredStorage
from sglang_tiered.integration.storage.host_pages import check_codec, page_layout, page_segments

LAYERS = 3


class Tier:
    """A device pool of one kind with its host pool, filled with noise."""

    page_size = PAGE

    def __init__(self, tensors: list[torch.Tensor], device_pool: Any, host_pool: Any) -> None:
        self.tensors, self.device_pool, self.host_pool = tensors, device_pool, host_pool
        generator = torch.Generator().manual_seed(len(tensors))
        for tensor in tensors:
            noise = torch.randint(0, 120, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
            tensor.view(-1).view(torch.uint8).copy_(noise)

    def slots(self, *pages: int) -> torch.Tensor:
        size = self.page_size
        return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])

    def rows(self, *pages: int) -> list[torch.Tensor]:
        return [tensor[self.slots(*pages)].clone() for tensor in self.tensors]

    def to_host(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host_pool.backup_from_device_all_layer(self.device_pool, host, device, "direct")

    def to_device(self, host: torch.Tensor, device: torch.Tensor) -> None:
        for layer in range(LAYERS):
            self.host_pool.load_to_device_per_layer(self.device_pool, host, device, layer, "direct")


class StateTier(Tier):
    """States have a slot each, and every layer in one tensor."""

    page_size = 1

    def rows(self, *pages: int) -> list[torch.Tensor]:
        return [tensor[:, list(pages)].clone() for tensor in self.tensors]


def heads(dtype: torch.dtype = torch.float32) -> Tier:
    device, host = heads_pools(LAYERS, dtype)
    return Tier([*device.k_buffer, *device.v_buffer], device, host)


def latent() -> Tier:
    device, host = latent_pools(LAYERS)
    return Tier(list(device.kv_buffer), device, host)


def states(temporal: tuple[int, ...] = (4, 8, 16), **extra: Any) -> StateTier:
    """As of Mamba-2; with an empty ``temporal`` as of a model with convolutions only."""
    ssm = torch.zeros(LAYERS, PAGES, *temporal)
    conv = torch.zeros(LAYERS, PAGES, 24, 3, dtype=torch.bfloat16)
    info = MambaStateBufferInfo(temporal=ssm, conv=(conv,), **extra)
    host = MambaPoolHost(info, 2.0, 0, device_capacity=PAGES, layout=LAYOUT)
    return StateTier([tensor for tensor in (ssm, conv) if tensor.numel()], None, host)


@pytest.fixture
def open_store(storages: Storages) -> Callable[..., TieredStorage]:
    def start(kv: Tier, **others: Tier) -> Any:
        storages.close()  # the restart
        pools = {PoolName(name): tier.host_pool for name, tier in others.items()}
        return storages.open(kv.host_pool, pools)

    return start


@pytest.mark.parametrize(
    "make",
    [heads, lambda: heads(torch.float8_e4m3fn), latent],
    ids=["heads", "heads-8-bit", "latent"],
)
def test_kv_pages_survive_disk_and_restart(make: Callable[[], Tier], open_store: Any) -> None:
    tier, keys = make(), hashes("a", "b", "c")
    before = tier.rows(5, 1, 3)
    tier.to_host(tier.slots(2, 9, 4), tier.slots(5, 1, 3))
    assert store_pages(open_store(tier), keys, tier.slots(2, 9, 4)) == [True] * 3

    after = make()  # another process: nothing in memory is left
    for tensor in after.tensors:
        tensor.zero_()
    storage = open_store(after)
    assert storage.batch_exists(keys) == 3
    assert load_pages(storage, keys, after.slots(11, 0, 6)) == [True] * 3
    after.to_device(after.slots(11, 0, 6), after.slots(7, 2, 4))
    for expected, found in zip(before, after.rows(7, 2, 4), strict=True):
        assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))
    for untouched in after.rows(1, 3, 5, 6):
        assert not untouched.view(torch.uint8).any()


@pytest.mark.parametrize(
    ("name", "make", "policy"),
    [
        ("draft", heads, PoolHitPolicy.ALL_PAGES),
        ("mamba", states, PoolHitPolicy.TRAILING_PAGES),
        ("mamba", lambda: states(temporal=(0,)), PoolHitPolicy.TRAILING_PAGES),
    ],
    ids=["draft", "states", "convolution-states"],
)
def test_pools_beside_kv_survive_disk_and_restart(
    name: str, make: Callable[[], Tier], policy: PoolHitPolicy, open_store: Any
) -> None:
    kv, side, keys = latent(), make(), hashes("a", "b")
    held = keys if policy is PoolHitPolicy.ALL_PAGES else keys[-1:]  # a state ends its prefix
    pages, targets = ((3, 1), (6, 2)) if len(held) == 2 else ((3,), (6,))
    before = side.rows(*pages)
    kv.to_host(kv.slots(0, 1), kv.slots(2, 3))
    side.to_host(side.slots(*pages), side.slots(*pages))
    storage = open_store(kv, **{name: side})
    store_pages(storage, keys, kv.slots(0, 1))
    query = PoolTransfer(PoolName(name), keys=held, hit_policy=policy)
    assert storage.batch_exists_v2(keys, [query]).kv_hit_pages == 0, "KV alone restores nothing"
    assert store_pages(storage, held, side.slots(*pages), PoolName(name)) == [True] * len(held)

    after = make()
    for tensor in after.tensors:
        tensor.zero_()
    restarted = open_store(latent(), **{name: after})
    assert restarted.batch_exists_v2(keys, [query]).kv_hit_pages == 2
    assert load_pages(restarted, held, after.slots(*targets), PoolName(name)) == [True] * len(held)
    after.to_device(after.slots(*targets), after.slots(*pages))
    for expected, found in zip(before, after.rows(*pages), strict=True):
        assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))


def test_pool_without_page_addresses_is_refused_at_start(open_store: Any) -> None:
    """SGLang's host pool of a model with side states has no page addresses: each store of it would
    fail in the background, and nothing would ever be found."""
    side = states(extra_checkpoint_buffers=(torch.zeros(PAGES, 5),))
    with pytest.raises(ConfigError, match="start with --tier-mode host") as caught:
        open_store(latent(), mamba=side)
    assert "mamba" in str(caught.value) and "\n" not in str(caught.value)


def test_draft_models_host_memory_is_within_the_cap() -> None:
    """SGLang makes the draft's host pool as many tokens long as the target's, beside it."""
    target, draft = latent(), heads()
    cap = 2 * MiB
    size = target_host_bytes(cap, target.device_pool, [draft.device_pool], page_size=PAGE)
    within = {**extent(target.device_pool), "target_layer_num": LAYERS}
    (info,) = target.device_pool.get_device_pool_infos()
    made = MLATokenToKVPoolHost(info.buffer_info, 2.0, size / 1e9, PAGE, LAYOUT, **within)
    (info,) = draft.device_pool.get_device_pool_infos()
    beside = MHATokenToKVPoolHost(
        info.buffer_info,
        made.logical_size / draft.device_pool.size,
        0,
        PAGE,
        LAYOUT,
        host_token_capacity=made.logical_size,
        **extent(draft.device_pool),
    )
    taken = sum(pool.size * pool.size_per_token for pool in (made, beside))
    page_bytes = PAGE * (made.size_per_token + beside.size_per_token)
    assert cap - 2 * page_bytes <= taken <= cap + page_bytes


@pytest.mark.parametrize("make", [heads, latent])
def test_lossy_codec_sees_one_host_pages_numbers(make: Callable[[], Tier]) -> None:
    """With the axes in another order, channels of other ranges would share their steps."""
    tier = make()
    for tensor in tier.tensors:
        values = torch.linspace(0, 1, tensor.numel()).reshape(tensor.shape)
        groups = torch.arange(tensor.shape[-1]) // 4  # that share a step in pages of 16 tokens
        tensor.copy_(values * 10.0 ** (groups % 7))
    slots = tier.slots(2)
    tier.to_host(slots, slots)
    layout = page_layout(tier.host_pool)
    (page,) = page_segments(tier.host_pool, slots, 1)
    assert layout.page_bytes == sum(segment.nbytes for segment in page)
    codec = make_codec("int8", layout)
    before = tier.rows(2)
    encoded = b"".join(codec.encode(page))
    assert len(encoded) < 0.6 * layout.page_bytes
    codec.decode(memoryview(encoded), page)
    tier.to_device(slots, slots)
    for old, new in zip(before, tier.rows(2), strict=True):
        error = (old.float() - new.float()).abs().flatten(0, -2).amax(0)
        assert (error <= 0.02 * old.float().abs().flatten(0, -2).amax(0)).all()


def test_lossy_codec_is_refused_with_equal_page_lengths() -> None:
    """Pages are told apart by their keys: it would quantize states as if they were KV."""
    kv = heads().host_pool
    with pytest.raises(ConfigError, match="the codec int8 cannot be used .* swa pool"):
        check_codec("int8", {PoolName.KV: kv, PoolName.SWA: heads().host_pool})
    check_codec("int8", {PoolName.KV: kv, PoolName.MAMBA: states().host_pool})
