"""Rotary position embedding: the rotation of each pair of dimensions at a position.

A head's dimensions are in pairs side by side (2i, 2i + 1), one complex number each, so that a rotation is one multiplication.
"""

from __future__ import annotations

import torch

from llmd.model.frequencies import Floats, inverse_frequencies
from llmd.store.model_config import ModelConfig


class Rope:
    """Makes the rotations of a step's positions; called once a step, not once a layer."""

    def __init__(self, config: ModelConfig, device: torch.device, factors: Floats | None = None) -> None:
        """`factors` [head_dim / 2]: divisors that a GGUF file brings (rope_freqs.weight)."""
        frequencies, scale = inverse_frequencies(config, factors)
        self._frequencies = torch.from_numpy(frequencies).to(device)
        self._scale = scale

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """complex64 [T, 1, head_dim / 2] for int64 positions [T]."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies
        return torch.polar(torch.full_like(angles, self._scale), angles)[:, None]


def rotate(heads: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate `heads` [T, N, head_dim] in place."""
    if heads.dtype == torch.float32:
        torch.view_as_complex(heads.unflatten(-1, (-1, 2))).mul_(rotations)
        return
    turned = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2))) * rotations
    heads.copy_(torch.view_as_real(turned).flatten(-2))
