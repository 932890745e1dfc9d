"""`NativePlan`: which matrices and vectors the native forward pass works on, from which tensors of the files each is made, and how it is packed.

A pure function of headers and settings: it reads no weight. Matrices that take the same input are one (q, k and v; gate and up). A linear keeps the
GGUF type it is stored in where the kernels have it; what they lack is dequantized and becomes 8 bits in groups of 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from llmd.config.server_args import ModelArgs
from llmd.kernels import packing
from llmd.store.model_config import ModelConfig
from llmd.store.parameters import Parameter, StoredTensor, layer_parameters, outer_parameters

#: Names of packed formats, as GGUF calls them.
NATIVE_QUANTS: Final = ("Q4_0", "Q4_1", "Q8_0")
FLOATS: Final = ("F32", "BF16", "F16")
#: Elements of k that share a scale: a quantized matrix has a multiple of it.
GROUP: Final = 32

_DTYPES: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ASKED: Final = {"int8": "Q8_0", "int4": "Q4_1"}
#: What `int4` leaves at 8 bits: the table that every token goes through twice.
_SENSITIVE: Final = ("embed", "lm_head")


class Part(Struct, frozen=True):
    """Rows that one tensor of the files gives. `heads` > 0: the rows of each of so many heads go from halves to pairs."""

    tensor: str
    rows: int
    heads: int = 0


class MatrixPlan(Struct, frozen=True):
    """One packed matrix [n, k]: `parts` one below the other."""

    name: str
    format: str
    n: int
    k: int
    parts: tuple[Part, ...]


class VectorPlan(Struct, frozen=True):
    """One float32 vector [n]: `parts` one behind the other."""

    name: str
    n: int
    parts: tuple[Part, ...]


class NativePlan(Struct, frozen=True):
    """Everything of one model. Names: `embed`, `lm_head` (absent when tied), `final_norm`, `LAYER.qkv`, `LAYER.attn_norm`..."""

    quantization: str
    """What decides how it is packed: part of the cache's key."""
    matrices: tuple[MatrixPlan, ...]
    vectors: tuple[VectorPlan, ...]


def make_plan(config: ModelConfig, stored: Mapping[str, StoredTensor], args: ModelArgs, *, gguf: bool) -> NativePlan:
    """The plan for `args` over the files' tensors, in the order of the computation."""
    planner = _Planner(config, stored, args, gguf)
    made: list[MatrixPlan | VectorPlan] = []
    for layer in range(config.num_layers):
        made += planner.layer(layer)
    made += planner.outer()
    matrices = tuple(one for one in made if isinstance(one, MatrixPlan))
    vectors = tuple(one for one in made if isinstance(one, VectorPlan))
    return NativePlan(f"{planner.quantization}-{args.dtype}", matrices, vectors)


def plan_bytes(plan: NativePlan) -> int:
    """Bytes that the packed weights of `plan` take."""
    return sum(packing.packed_size(matrix.format, matrix.n, matrix.k) for matrix in plan.matrices) + sum(4 * vector.n for vector in plan.vectors)


def main_format(plan: NativePlan) -> str:
    """What most of the matrices' numbers are packed as: `Q4_1`, or a type like `float16`."""
    sizes: dict[str, int] = {}
    for matrix in plan.matrices:
        sizes[matrix.format] = sizes.get(matrix.format, 0) + matrix.n * matrix.k
    most = max(sizes, key=lambda format: sizes[format])
    return next((name for name, format in _DTYPES.items() if format == most), most)


def effective_quantization(args: ModelArgs) -> str:
    """`quantization` with what `dtype` implies: float32 written out means no quantized weights."""
    return "none" if args.quantization == "auto" and args.dtype == "float32" else args.quantization


class _Planner:
    def __init__(self, config: ModelConfig, stored: Mapping[str, StoredTensor], args: ModelArgs, gguf: bool) -> None:
        self._config, self._stored, self._gguf = config, stored, gguf
        self.quantization = effective_quantization(args)
        self._dtype = args.dtype

    def outer(self) -> Iterator[MatrixPlan | VectorPlan]:
        for parameter in outer_parameters(self._config):
            yield self._made(parameter.name, parameter.name, [parameter])

    def layer(self, index: int) -> Iterator[MatrixPlan | VectorPlan]:
        found = {parameter.name: parameter for parameter in layer_parameters(self._config, index)}
        for name, members in (("qkv", ("q", "k", "v")), ("o", ("o",)), ("gate_up", ("gate", "up")), ("down", ("down",))):
            yield self._made(f"{index}.{name}", name, [found[member] for member in members])
            biases = [found[f"{member}_bias"] for member in members if f"{member}_bias" in found]
            if biases:
                yield self._made(f"{index}.{name}_bias", f"{name}_bias", biases)
        for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
            if name in found:
                yield self._made(f"{index}.{name}", name, [found[name]])

    def _made(self, name: str, kind: str, parameters: Sequence[Parameter]) -> MatrixPlan | VectorPlan:
        parts = tuple(Part(p.gguf if self._gguf else p.hf, p.shape[0], paired_heads(self._config, p.name)) for p in parameters)
        n = sum(part.rows for part in parts)
        if len(parameters[0].shape) == 1:
            return VectorPlan(name, n, parts)
        k = parameters[0].shape[1]
        return MatrixPlan(name, self._format(kind, [self._stored[part.tensor].type for part in parts], k), n, k, parts)

    def _format(self, kind: str, stored: Sequence[str], k: int) -> str:
        if self.quantization in _ASKED and k % GROUP == 0:
            return "Q8_0" if kind in _SENSITIVE else _ASKED[self.quantization]
        if self.quantization == "auto" and k % GROUP == 0 and not any(kind in FLOATS for kind in stored):
            return stored[0] if stored[0] in NATIVE_QUANTS and len(set(stored)) == 1 else "Q8_0"
        if self._dtype in _DTYPES:
            return _DTYPES[self._dtype]
        return stored[0] if stored[0] in FLOATS and len(set(stored)) == 1 else "F32"


def paired_heads(config: ModelConfig, name: str) -> int:
    """Heads whose rows must be reordered in parameter `name`: rotations take pairs side by side, most files hold halves.

    GGUF's converter pairs the weights of llama, but not their norms.
    """
    kind, _, what = name.partition("_")
    if kind not in ("q", "k") or what not in ("", "bias", "norm") or (config.permuted_qk and what != "norm"):
        return 0
    return 1 if what == "norm" else config.num_heads if kind == "q" else config.num_kv_heads
