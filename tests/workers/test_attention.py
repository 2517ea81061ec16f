from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.workers.reference import grouped_rollouts
from tests.workers.varlen_on_cpu import varlen_on_cpu
from workers.attention import packed_attention
from workers.packing import PackedBatch, pack

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def visible(packed: PackedBatch, window: int | None) -> torch.Tensor:
    """bool [N, N] by definition: own prompt or own response, not later, within the window."""
    block, segment = [], []
    for index, b in enumerate(packed.blocks):
        for number, length in enumerate((b.prompt_length, *b.response_lengths)):
            block += [index] * length
            segment += [number] * length
    blocks, segments, positions = torch.tensor(block), torch.tensor(segment), packed.position_ids
    same = (blocks[:, None] == blocks) & ((segments == 0) | (segments[:, None] == segments))
    mask = same & (positions <= positions[:, None])
    return mask if window is None else mask & (positions > positions[:, None] - window)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("share", [True, False])
def test_segments_equal_one_dense_mask(share: bool, window: int | None, softcap: float | None) -> None:
    packed = pack(grouped_rollouts([4, 1, 6], [[3, 1], [5], [2, 2, 7]]), share_prompts=share)
    n = len(packed.token_ids)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, n, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    output, _ = packed_attention(
        nn.Module(), q, k, v, None, packing=packed, scaling=0.3, sliding_window=window, softcap=softcap
    )
    scores = q @ k.repeat_interleave(HEADS // KEY_HEADS, 1).transpose(2, 3) * 0.3
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible(packed, window), float("-inf")).softmax(-1)
    expected = (weights @ v.repeat_interleave(HEADS // KEY_HEADS, 1)).transpose(1, 2)
    tolerance = 1e-6 if softcap is not None else 1e-12  # soft-capped weights go through float32
    assert torch.allclose(output, expected, atol=tolerance)
    direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((output * direction).sum(), (q, k, v))
    for got, want in zip(gradients, torch.autograd.grad((expected * direction).sum(), (q, k, v)), strict=True):
        assert torch.allclose(got, want, atol=tolerance)


@pytest.mark.parametrize(("scaling", "softcap"), [(None, None), (0.3, None), (0.3, 2.0)])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("share", [True, False])
def test_one_call_of_the_kernel_equals_the_segments(
    share: bool, window: int | None, scaling: float | None, softcap: float | None
) -> None:
    """What it is given: keys, offsets, longest ranges and scale. The GPU's own kernel is tested in test_cuda.py."""
    packed = pack(grouped_rollouts([4, 1, 6], [[3, 1], [5], [2, 2, 7]]), share_prompts=share)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, len(packed.token_ids), SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )

    def attend() -> list[torch.Tensor]:
        output, _ = packed_attention(
            nn.Module(), q, k, v, None, packing=packed, scaling=scaling, sliding_window=window, softcap=softcap
        )
        return [output, *torch.autograd.grad(output.square().sum(), (q, k, v))]

    expected = attend()
    with varlen_on_cpu():
        got = attend()
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"dropout": 0.1}, "dropout 0.1"), ({"s_aux": torch.zeros(4)}, "sinks")],
)
def test_what_packed_attention_cannot_do_is_refused(arguments: dict[str, object], problem: str) -> None:
    packed = pack(grouped_rollouts([2], [[2]]), share_prompts=True)
    states = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=problem):
        packed_attention(nn.Module(), states, states, states, None, packing=packed, **arguments)  # type: ignore[arg-type]
