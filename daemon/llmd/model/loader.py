"""`load_model`: from checked files to a model in memory. Every parameter must be provided; nothing is filled in.

GGUF types are dequantized. Weights of linears are turned to [in, out], so that a product reads them row by row as they lie: with the rows
of few tokens that is half the time. Other tensors of the right type stay views of the mapping, shared through the page cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from llmd.config.server_args import ModelArgs
from llmd.errors import ConfigError
from llmd.model.exact import RowPlan, linear_plan
from llmd.model.kv_cache import kv_bytes_per_token
from llmd.model.llama import Layer, Linear, LlamaModel, RMSNorm
from llmd.model.rope import Rope
from llmd.model.source import Source, open_source, rope_factors
from llmd.plan.spec import Boot
from llmd.store.model_config import ModelConfig
from llmd.store.parameters import Parameter, all_parameters, layer_parameters, outer_parameters
from llmd.store.quant import dequantize

Progress = Callable[[str, int, int], None]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STAGE: Final = "weights"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the scheduler's budget and status need to know of it."""

    module: LlamaModel
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weights_bytes: int
    """In memory, mapped views included."""
    quantization: str

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.config, self.kv_dtype)


def load_model(boot: Boot, progress: Progress) -> LoadedModel:
    """Load the model of `boot`. `progress(stage, done, total)` counts bytes of the files. Raises ConfigError."""
    args = boot.args.model
    device = _device(args)
    dtype, kv_dtype = _dtypes(args, device)
    if isinstance(args.threads, int):
        torch.set_num_threads(args.threads)
    source = open_source(boot.files)
    with torch.inference_mode():
        builder = _Builder(source, device, dtype, args.verify_weights, progress)
        module = builder.model()
    return LoadedModel(module, source.config, device, dtype, kv_dtype, builder.bytes, "none")


def _device(args: ModelArgs) -> torch.device:
    has_cuda = args.device != "cpu" and torch.cuda.is_available()
    if args.device == "cuda" and not has_cuda:
        raise ConfigError("model.device: cuda: torch finds no CUDA GPU here; set it to cpu or auto")
    return torch.device("cuda" if has_cuda else "cpu")


def _dtypes(args: ModelArgs, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(activations and weights, KV cache)"""
    if args.quantization not in ("auto", "none"):
        raise ConfigError(f"model.quantization: {args.quantization} is not available; set it to auto or none")
    if args.kv_cache_dtype == "int8":
        raise ConfigError("model.kv_cache_dtype: int8 is not available; set it to auto, float32 or bfloat16")
    automatic = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = DTYPES.get(args.dtype, automatic)
    kv = torch.float32 if args.dtype == "float32" else torch.bfloat16
    return dtype, DTYPES.get(args.kv_cache_dtype, kv)


def _tensor(source: Source, name: str) -> torch.Tensor:
    """Tensor `name`: float types as they are, a view where possible; others dequantized."""
    stored, raw = source.tensors()[name], source.raw(name)
    if stored.type in _STORED:
        return _view(raw.reshape(-1), stored.type, stored.shape)
    return torch.from_numpy(dequantize(raw, stored.type)).view(stored.shape)


def _view(raw: npt.NDArray[np.uint8], kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on mapped bytes. The mapping is read-only and so is our use of it, which torch cannot know."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(raw)
    if flat.data_ptr() % _STORED[kind].itemsize:
        flat = flat.clone()
    return flat.view(_STORED[kind]).view(shape)


class _Builder:
    """Reads each parameter once, converts, fuses, and counts."""

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype, verify: bool, progress: Progress) -> None:
        self._source, self._device, self._dtype, self._verify, self._progress = source, device, dtype, verify, progress
        self._config = source.config
        self._stored = source.tensors()
        self._total = sum(self._stored[source.name(parameter)].nbytes for parameter in all_parameters(self._config))
        self._done = 0
        self._plans: dict[torch.Size, RowPlan] = {}
        self.bytes = 0

    def model(self) -> LlamaModel:
        config = self._config
        outer = {parameter.name: self._read(parameter) for parameter in outer_parameters(config)}
        head = self._linear([outer["embed" if config.tie_embeddings else "lm_head"]])
        embedding = head.weight.t() if config.tie_embeddings else self._keep(outer["embed"])
        layers = [self._layer(index) for index in range(config.num_layers)]
        rope = Rope(config, self._device, rope_factors(self._source))
        return LlamaModel(config, embedding, layers, RMSNorm(self._keep(outer["final_norm"]), config.rms_eps), head, rope)

    def _layer(self, index: int) -> Layer:
        config = self._config
        found = {parameter.name: self._read(parameter) for parameter in layer_parameters(config, index)}
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            for key, count in ((name, heads), (f"{name}_bias", heads), (f"{name}_norm", 1)):
                # GGUF's converter pairs the weights of llama; every other tensor still has its halves one behind the other.
                if key in found and not (config.permuted_qk and not key.endswith("_norm")):
                    found[key] = pair(found[key], count)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(self._keep(found[name]), config.rms_eps)

        def linear(*names: str) -> Linear:
            biases = [found[f"{name}_bias"] for name in names if f"{name}_bias" in found]
            return self._linear([found[name] for name in names], biases)

        return Layer(
            index=index,
            attn_norm=norm("attn_norm"),
            qkv=linear("q", "k", "v"),
            q_norm=norm("q_norm") if config.qk_norm else None,
            k_norm=norm("k_norm") if config.qk_norm else None,
            o=linear("o"),
            mlp_norm=norm("mlp_norm"),
            gate_up=linear("gate", "up"),
            down=linear("down"),
        )

    def _linear(self, parts: list[torch.Tensor], biases: Sequence[torch.Tensor] = ()) -> Linear:
        """`parts` [out, in] beside each other as one linear."""
        weight = torch.empty((parts[0].shape[1], sum(len(part) for part in parts)), dtype=self._dtype, device=self._device)
        for part, place in zip(parts, weight.split([len(part) for part in parts], dim=1), strict=True):
            place.copy_(part.t())
        self.bytes += weight.nbytes
        if weight.shape not in self._plans:
            self._plans[weight.shape] = linear_plan(weight)
        return Linear(weight, self._keep(*biases) if biases else None, self._plans[weight.shape])

    def _read(self, parameter: Parameter) -> torch.Tensor:
        name = self._source.name(parameter)
        tensor = _tensor(self._source, name)
        if self._verify and not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"{self._source.path}: tensor {name!r} holds NaN or Inf")
        self._done += self._stored[name].nbytes
        self._progress(STAGE, self._done, self._total)
        return tensor

    def _keep(self, *parts: torch.Tensor) -> torch.Tensor:
        """One tensor of all parts, in our type and on our device."""
        if len(parts) == 1:
            kept = parts[0].to(self._device, self._dtype)
        else:
            kept = torch.cat([part.to(self._device, self._dtype) for part in parts])
        self.bytes += kept.nbytes
        return kept


def pair(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from halves (i, i + dim / 2) to pairs (2i, 2i + 1), as llmd.model.rope wants them."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
