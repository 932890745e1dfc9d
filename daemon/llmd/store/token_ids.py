"""Whether the ids of the begin and end tokens that a model's files name can be: wholly wrong ones would be ignored, and its answers never end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def id_faults(values: Mapping[str, Any], names: Mapping[str, bool], vocab_size: int, source: str) -> list[str]:
    """One line for each key of `names` (key -> whether a list is allowed) that holds anything but ids below `vocab_size`; absent and null are none."""
    faults = []
    for key, several in names.items():
        value = values.get(key)
        ids = value if several and isinstance(value, list) else [] if value is None else [value]
        for each in ids:
            if not isinstance(each, int) or isinstance(each, bool):
                faults.append(f"{source}: {key}: expected the id of a token, got {each!r:.40}")
            elif not 0 <= each < vocab_size:
                faults.append(f"{source}: {key}: {each} is not in the vocabulary of {vocab_size}")
    return faults


#: Of config.json and generation_config.json.
HF = {"bos_token_id": False, "eos_token_id": True}
#: Of a GGUF file's metadata.
GGUF = {"tokenizer.ggml.bos_token_id": False, "tokenizer.ggml.eos_token_id": False}
