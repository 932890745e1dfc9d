"""From `model.path` to checked `ModelFiles`: what there is, whether it is whole, and its small files in place. No torch, no tensor read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmd import failpoints
from llmd.config.server_args import ModelArgs
from llmd.errors import ConfigError, LlmdError, ResourceError
from llmd.model import native
from llmd.plan.spec import ModelFiles
from llmd.store import catalog, dummy, model_config, small_files, token_ids
from llmd.store.gguf import GgufFile, lfs_hint, regular_file_size
from llmd.store.model_config import ModelConfig
from llmd.store.native_plan import NativePlan, main_format, make_plan, plan_bytes
from llmd.store.parameters import parameter_count, parameter_faults
from llmd.store.safetensors_dir import INDEX, SafetensorsDir, read_json
from llmd.store.token_ids import id_faults
from llmd.tokenizer.chat import ChatTemplate
from llmd.tokenizer.load import Tokenizer, load_tokenizer
from llmd.tokenizer.token_bytes import TokenBytes

#: Small files taken as they are from a model's directory.
COPIED = ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
MAX_SMALL = 64 * 2**20
#: Encoded and decoded at each check.
SENTENCE = "Hello, world! 12 + 30 = 42: naïve café, 你好."


@dataclass(frozen=True)
class _Found:
    """A model whose big files are checked; `make` gives its small files, made from `sources`."""

    kind: Literal["gguf", "safetensors", "dummy"]
    path: str
    name: str
    version: str
    weights_bytes: int
    context_length: int
    vocab_size: int
    architecture: str
    quantization: str
    parameters: int
    kv_values_per_token: int
    kv_vectors_per_token: int
    native_plan: Callable[[ModelArgs], NativePlan | None]
    """How the native kernels would have the weights; needs these kernels."""
    sources: small_files.Files
    make: Callable[[], small_files.Files]


def model_files(args: ModelArgs, cache_dir: Path, places: Sequence[Path] = ()) -> ModelFiles:
    """Check the model that `args` names.

    `places`: where its small files may be put, if they are not in the cache already: the first that can be written; none given: the cache.
    Raises ConfigError with all faults, ResourceError where no place can be written or the system fails.
    """
    try:
        return _model_files(args, cache_dir, places or [cache_dir])
    except OSError as error:
        raise _os_fault(args, error) from None


def _os_fault(args: ModelArgs, error: OSError) -> LlmdError:
    """What the system refuses, under the key that asked for it: a path that may not be searched or read, or is none at all."""
    file = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else ""
    other = args.tokenizer_path
    key, value = ("model.tokenizer_path", other) if other is not None and file.startswith(other) else ("model.path", args.path)
    message = f"{key}: {value}: {f'{file}: ' if file not in ('', value) else ''}{error.strerror or error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(message, hint=f"uid {os.geteuid()}, as which llmd runs, must be able to read the files and to search the directories above them")
    return ConfigError(message) if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.ENOENT, errno.EISDIR) else ResourceError(message)


def _model_files(args: ModelArgs, cache_dir: Path, places: Sequence[Path]) -> ModelFiles:
    found = _find(args.path, cache_dir)
    kernels = _kernels(found, args)
    sources, make = found.sources, found.make
    if args.tokenizer_path is not None:
        other = _tokenizer_override(Path(args.tokenizer_path))
        sources = {**sources, **other}

        def make() -> small_files.Files:
            return {**found.make(), **other}

    candidates = [small_files.small_dir(place, found.name, found.version, sources) for place in (cache_dir, *places)]
    small = small_files.install_first(candidates[0], candidates[1:], found.version, make)
    origin = found.path or str(small)  # what a fault is told of; of a GGUF file, what was made from it
    failpoints.hit("store.tokenizer")
    try:
        tokenizer = load_tokenizer(small)
        table = TokenBytes.load(small)
        template = ChatTemplate.load(small, args.chat_template)
    except ConfigError as error:
        raise ConfigError([fault.replace(str(small), origin) for fault in error.faults], hint=error.hint) from None
    bos = tokenizer.bos_token_id
    faults = _tokenizer_faults(tokenizer, table, found.vocab_size, f"{origin}/tokenizer.json")
    if faults:
        raise ConfigError(faults)
    plan = found.native_plan(args) if kernels else None
    return ModelFiles(
        kind=found.kind,
        path=found.path,
        name=found.name,
        small_dir=str(small),
        weights_version=found.version,
        weights_bytes=found.weights_bytes,
        context_length=found.context_length,
        vocab_size=found.vocab_size,
        tokenizer_size=tokenizer.size,
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token_id=bos,
        add_bos=bos is not None and tokenizer.encode("a", add_special_tokens=True)[:1] == [bos],
        has_chat_template=template is not None,
        architecture=found.architecture,
        quantization=found.quantization,
        parameters=found.parameters,
        kv_values_per_token=found.kv_values_per_token,
        kv_vectors_per_token=found.kv_vectors_per_token,
        kernels=kernels,
        native_bytes=plan_bytes(plan) if plan is not None else 0,
        native_format=main_format(plan) if plan is not None else "",
    )


def _kernels(found: _Found, args: ModelArgs) -> str:
    """The native kernels' name where they serve on a CPU, else empty. Raises ConfigError where they are needed and not there."""
    if found.kind == "dummy":
        return ""
    reason = native.why_not()
    if reason is None:
        return native.kernels_name()
    if faults := native.needs_native(args, reason):
        raise ConfigError(faults)
    return ""


def _find(path: str, cache_dir: Path) -> _Found:
    if path == "dummy":
        return _Found(
            kind="dummy", path="", name="dummy", version=dummy.VERSION, weights_bytes=0, context_length=dummy.CONTEXT_LENGTH, vocab_size=dummy.VOCAB_SIZE,
            architecture="dummy", quantization="none", parameters=0, kv_values_per_token=dummy.KV_VALUES_PER_TOKEN, kv_vectors_per_token=0,
            native_plan=lambda args: None, sources={}, make=dummy.small_files,
        )  # fmt: skip
    if path in catalog.CATALOG:
        pulled = catalog.pulled_path(path, cache_dir)
        if pulled is None:
            raise ConfigError(f"model.path: {path} is not in {cache_dir} yet; `llmd pull {path}` fetches it")
        return _gguf(pulled, path)
    location = Path(path)
    if location.is_dir():
        return _directory(location)
    if not location.exists():
        raise ConfigError(
            f"model.path: {path}: no such file or directory, and not the name of an embedded model ({', '.join(catalog.CATALOG)}); "
            "it takes a GGUF file or a directory with config.json and safetensors, and `llmd pull hf:OWNER/NAME` fetches one"
        )
    return _gguf(location.absolute(), location.name.removesuffix(".gguf"))


def _gguf(path: Path, name: str) -> _Found:
    file = GgufFile(path)
    if file.metadata.get("split.count", 0) not in (0, 1):
        raise ConfigError(f"{path}: one part of a split GGUF file; join the parts (llama-gguf-split --merge)")
    config = model_config.from_gguf(file)
    faults = parameter_faults(config, file.tensors, str(path), gguf=True) + id_faults(file.metadata, token_ids.GGUF, config.vocab_size, str(path))
    if faults:
        raise ConfigError(faults)
    sizes: dict[str, int] = {}
    for tensor in file.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    digest = hashlib.sha256(f"{path.name}\n{file.size}\n".encode() + file.header())
    return _Found(
        kind="gguf",
        path=str(path),
        name=name,
        version=f"{path.name}@{digest.hexdigest()[:12]}",
        weights_bytes=sum(sizes.values()),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        architecture=config.architecture,
        quantization=max(sizes, key=lambda kind: sizes[kind]),
        parameters=parameter_count(config),
        kv_values_per_token=config.kv_values_per_token,
        kv_vectors_per_token=config.kv_vectors_per_token,
        native_plan=lambda args: make_plan(config, file.tensors, args, gguf=True),
        sources={},
        make=lambda: _small_from_gguf(file, config),
    )


def _small_from_gguf(file: GgufFile, config: ModelConfig) -> small_files.Files:
    from llmd.tokenizer.from_gguf import tokenizer_json_from_gguf

    meta = file.metadata

    def token(name: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < config.vocab_size else None

    ends = [id for id in (token("eos"), token("eot"), token("eom")) if id is not None]
    known: dict[str, Any] = {
        "model_type": config.architecture, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads, "max_position_embeddings": config.context_length,
        "bos_token_id": token("bos"), "eos_token_id": list(dict.fromkeys(ends)), "pad_token_id": token("padding"), "unk_token_id": token("unknown"),
    }  # fmt: skip
    files = {"tokenizer.json": tokenizer_json_from_gguf(meta).encode(), "config.json": json.dumps(known).encode()}
    template = meta.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        files["chat_template.jinja"] = template.encode()
    return files


def _directory(path: Path) -> _Found:
    path = path.absolute()
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _gguf(ggufs[0], ggufs[0].name.removesuffix(".gguf"))
        raise ConfigError(f"{path}: no config.json in it{'; give one of its GGUF files as model.path' if ggufs else ''}")
    raw = read_json(path / "config.json")
    config = model_config.from_hf(raw, str(path / "config.json"))
    faults = id_faults(raw, token_ids.HF, config.vocab_size, str(path / "config.json"))
    if (generation := path / "generation_config.json").exists():
        faults += id_faults(read_json(generation), token_ids.HF, config.vocab_size, str(generation))
    weights: SafetensorsDir | None = None
    try:
        weights = SafetensorsDir(path)
        faults += parameter_faults(config, weights.tensors, str(path), gguf=False)
    except ConfigError as error:
        faults += error.faults
    if not (path / "tokenizer.json").exists():
        faults.append(f"{path}: no tokenizer.json in it (llmd needs the fast tokenizer; transformers' save_pretrained writes it)")
    if faults or weights is None:
        raise ConfigError(faults)
    digest = hashlib.sha256()
    for shard in weights.shards:
        digest.update(f"{shard.path.name}\n{shard.size}\n".encode() + shard.header)
    if (path / INDEX).exists():
        digest.update((path / INDEX).read_bytes())
    sources = {name: _small(path / name) for name in COPIED if (path / name).exists()}
    return _Found(
        kind="safetensors",
        path=str(path),
        name=path.name or "model",
        version=f"{path.name or 'model'}@{digest.hexdigest()[:12]}",
        weights_bytes=sum(tensor.nbytes for tensor in weights.tensors.values()),
        context_length=config.context_length,
        vocab_size=config.vocab_size,
        architecture=config.architecture,
        quantization=_float_name(weights),
        parameters=parameter_count(config),
        kv_values_per_token=config.kv_values_per_token,
        kv_vectors_per_token=config.kv_vectors_per_token,
        native_plan=lambda args: make_plan(config, weights.tensors, args, gguf=False),
        sources=sources,
        make=lambda: sources,
    )


def _float_name(weights: SafetensorsDir) -> str:
    sizes: dict[str, int] = {}
    for tensor in weights.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    kind = max(sizes, key=lambda kind: sizes[kind])
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, kind)


def _small(path: Path) -> bytes:
    if regular_file_size(path) > MAX_SMALL:
        raise ConfigError(f"{path}: larger than {MAX_SMALL} bytes")
    data = path.read_bytes()
    if hint := lfs_hint(data[:64]):
        raise ConfigError(f"{path}{hint}")
    return data


def _tokenizer_override(path: Path) -> small_files.Files:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"model.tokenizer_path: {file}: no such file")
    files = {"tokenizer.json": _small(file)}
    config = file.parent / "tokenizer_config.json"
    if config.exists():
        files["tokenizer_config.json"] = _small(config)
    return files


def _tokenizer_faults(tokenizer: Tokenizer, table: TokenBytes, vocab_size: int, source: str) -> list[str]:
    """Whether the tokenizer fits the model and gives back what it is given."""
    if tokenizer.size > vocab_size:
        return [f"{source}: the tokenizer has {tokenizer.size} tokens, the model's embedding only {vocab_size}: they do not belong together"]
    ends = [id for id in tokenizer.eos_token_ids if not 0 <= id < vocab_size]
    if ends:
        return [f"{source}: the end token {ends[0]} is not in the vocabulary of {vocab_size}"]
    try:
        ids = tokenizer.encode(SENTENCE, add_special_tokens=False)
        decoder = table.decoder(skip_special_tokens=False)
        back = decoder.feed(ids) + decoder.flush()
    except Exception as error:  # the library raises bare Exception
        return [f"{source}: the tokenizer fails on a plain sentence: {error}"]
    if not ids or not all(0 <= id < vocab_size for id in ids):
        return [f"{source}: the tokenizer gives ids that the model does not have"]
    return [] if back.strip() == SENTENCE else [f"{source}: the tokenizer does not give back the sentence it encoded"]
