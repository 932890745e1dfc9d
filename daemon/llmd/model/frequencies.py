"""Rotary frequencies of each pair of dimensions, stretched as the model's configuration says. numpy only: both forward passes rotate by them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llmd.store.model_config import ModelConfig, RopeScaling

Floats = npt.NDArray[np.float32]


def inverse_frequencies(config: ModelConfig, factors: Floats | None = None) -> tuple[Floats, float]:
    """(float32 [head_dim / 2], factor on the rotated values). `factors` [head_dim / 2]: divisors that a GGUF file brings."""
    frequencies, scale = _stretched(config)
    return (frequencies if factors is None else frequencies / factors), scale


def _stretched(config: ModelConfig) -> tuple[Floats, float]:
    half = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    base = (np.float32(1.0) / np.float32(config.rope_theta) ** half).astype(np.float32)
    scaling = config.rope_scaling
    match scaling.kind:
        case "linear":
            return base / np.float32(scaling.factor), 1.0
        case "llama3":
            return _llama3(base, scaling), 1.0
        case "yarn":
            return _yarn(base, config), _yarn_scale(scaling)
    return base, 1.0


def _llama3(base: Floats, scaling: RopeScaling) -> Floats:
    """Long waves are stretched by `factor`, short ones stay, those between are mixed (Llama 3.1's reference code)."""
    wavelength = 2 * math.pi / base
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_context / wavelength - low) / (high - low)
    mixed = (1 - smooth) * base / scaling.factor + smooth * base
    long, short = wavelength > scaling.original_context / low, wavelength < scaling.original_context / high
    return np.where(long, base / scaling.factor, np.where(short, base, mixed)).astype(np.float32)


def _yarn(base: Floats, config: ModelConfig) -> Floats:
    """YaRN (arXiv 2309.00071, section 3.2): interpolate where a wave turns fewer than beta_slow times in the original context."""
    scaling, dim = config.rope_scaling, config.head_dim

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp: Floats = ((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)).clip(0, 1)
    return (base / scaling.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _yarn_scale(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
