"""Short convolutions against PyTorch's own, and against themselves when cut anywhere."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import conv1d, silu

from sglang_tiered.integration.platforms.short_conv import causal_conv1d_fn, causal_conv1d_update

CHANNELS, WIDTH, SLOTS = 6, 3, 5


@pytest.fixture
def weight() -> torch.Tensor:
    return inputs(WIDTH, 0)


@pytest.fixture
def bias() -> torch.Tensor:
    return torch.randn(CHANNELS, generator=torch.Generator().manual_seed(1))


def inputs(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(CHANNELS, tokens, generator=torch.Generator().manual_seed(seed))


def fresh_states() -> torch.Tensor:
    return torch.full((SLOTS, CHANNELS, WIDTH - 1), 7.0)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_whole_sequences_equal_pytorchs_convolution(
    weight: torch.Tensor, bias: torch.Tensor, activation: str | None, with_bias: bool
) -> None:
    lengths = [9, 1, 4]
    sequences = [inputs(length, seed) for seed, length in enumerate(lengths)]
    states = fresh_states()
    out = causal_conv1d_fn(
        torch.cat(sequences, dim=1),
        weight,
        bias if with_bias else None,
        query_start_loc=torch.tensor([0, 9, 10, 14]),
        cache_indices=torch.tensor([4, 0, 2]),
        has_initial_state=torch.tensor([False] * 3),
        conv_states=states,
        activation=activation,
        seq_lens_cpu=lengths,
    )
    for sequence, own, slot in zip(sequences, out.split(lengths, dim=1), (4, 0, 2), strict=True):
        padded = torch.cat([torch.zeros(CHANNELS, WIDTH - 1), sequence], dim=1)
        expected = conv1d(
            padded[None], weight[:, None], bias if with_bias else None, groups=CHANNELS
        )[0]
        torch.testing.assert_close(own, silu(expected) if activation else expected)
        assert torch.equal(states[slot], padded[:, -(WIDTH - 1) :])
    assert (states[[1, 3]] == 7.0).all(), "nobody else's state"


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_continued_sequence_gives_the_same_bits(
    weight: torch.Tensor, bias: torch.Tensor, cut: int
) -> None:
    whole, states, other = inputs(9, 3), fresh_states(), fresh_states()

    def prefill(part: torch.Tensor, target: torch.Tensor, *, continues: bool) -> torch.Tensor:
        return causal_conv1d_fn(
            part,
            weight,
            bias,
            query_start_loc=torch.tensor([0, part.shape[1]]),
            cache_indices=torch.tensor([1], dtype=torch.int32),
            has_initial_state=torch.tensor([continues]),
            conv_states=target,
            activation=None,  # vectorized, it may round by position
        )

    at_once = prefill(whole, states, continues=False)
    parts = [
        prefill(whole[:, :cut], other, continues=False),
        prefill(whole[:, cut:], other, continues=True),
    ]
    assert torch.equal(torch.cat(parts, dim=1), at_once)
    assert torch.equal(other, states)


def test_decode_steps_give_the_bits_of_a_prefill(weight: torch.Tensor, bias: torch.Tensor) -> None:
    whole, states = inputs(7, 4), fresh_states()
    states[3] = 0.0
    steps = [
        causal_conv1d_update(
            whole[:, token][None], states, weight, bias, conv_state_indices=torch.tensor([3])
        )
        for token in range(7)
    ]
    expected = causal_conv1d_fn(
        whole,
        weight,
        bias,
        query_start_loc=torch.tensor([0, 7]),
        cache_indices=torch.tensor([0]),
        conv_states=fresh_states(),
        activation=None,
    )
    assert torch.equal(torch.cat(steps).T, expected)
    assert torch.equal(states[3], whole[:, -2:])


def test_padding_is_refused(weight: torch.Tensor) -> None:
    """Of other platforms: slot -1 would be the last request's here."""
    x, at = torch.zeros(2, CHANNELS), torch.tensor([0, -1])
    with pytest.raises(NotImplementedError, match="padding"):
        causal_conv1d_update(x, fresh_states(), weight, None, None, conv_state_indices=at)
