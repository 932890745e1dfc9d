"""Rotary position embedding: the frequencies of each pair of dimensions, stretched as the model's configuration says.

A head's dimensions are in pairs side by side (2i, 2i + 1), one complex number each, so that a rotation is one multiplication.
"""

from __future__ import annotations

import math

import torch

from llmd.store.model_config import ModelConfig, RopeScaling


class Rope:
    """Makes the rotations of a step's positions; called once a step, not once a layer."""

    def __init__(self, config: ModelConfig, device: torch.device, factors: torch.Tensor | None = None) -> None:
        """`factors` [head_dim / 2]: divisors that a GGUF file brings (rope_freqs.weight)."""
        frequencies, scale = inverse_frequencies(config)
        if factors is not None:
            frequencies = frequencies / factors.to(torch.float32)
        self._frequencies = frequencies.to(device)
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


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(float32 [head_dim / 2], factor on the rotated values)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    base = 1.0 / (config.rope_theta**half)
    scaling = config.rope_scaling
    match scaling.kind:
        case "linear":
            return base / scaling.factor, 1.0
        case "llama3":
            return _llama3(base, scaling), 1.0
        case "yarn":
            return _yarn(base, config), _yarn_scale(scaling)
    return base, 1.0


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones stay, those between are mixed (Llama 3.1's reference code)."""
    wavelength = 2 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context / wavelength - low) / (high - low)
    mixed = (1 - smooth) * base / scaling.factor + smooth * base
    long, short = wavelength > scaling.original_context / low, wavelength < scaling.original_context / high
    return torch.where(long, base / scaling.factor, torch.where(short, base, mixed))


def _yarn(base: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate where a wave turns fewer than beta_slow times in the original context."""
    scaling, dim = config.rope_scaling, config.head_dim

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _yarn_scale(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
