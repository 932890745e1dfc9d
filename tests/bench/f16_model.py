"""Write a GGUF's weights once more, dequantized to F16: `python -m tests.bench.f16_model SOURCE.gguf TARGET.gguf`. The same file for llmd and its peers."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np


def convert(source: Path, target: Path) -> None:
    """All metadata as it is; matrices as F16, vectors as F32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor(tensor.name, values.reshape(shape).astype(np.float16 if len(shape) == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
