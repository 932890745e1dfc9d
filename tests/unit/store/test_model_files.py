"""From `model.path` to ModelFiles: facts, small files, and every fault that can be seen without loading."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from llmd.config.server_args import ModelArgs
from llmd.errors import ConfigError, ResourceError
from llmd.plan.spec import ModelFiles
from llmd.store import small_files
from llmd.store.model_files import model_files
from llmd.tokenizer.chat import ChatTemplate
from llmd.tokenizer.load import load_tokenizer
from tests.models import BOS, EOS, VOCAB, gguf_of, permutation_llama, random_llama, read_checkpoint, write_checkpoint


def found(path: Path | str, cache: Path, **args: Any) -> ModelFiles:
    return model_files(ModelArgs(path=str(path), **args), cache)


def test_a_directory(tmp_path: Path) -> None:
    files = found(permutation_llama(tmp_path / "tiny"), tmp_path / "cache")
    assert (files.kind, files.name, files.path, files.architecture, files.quantization) == ("safetensors", "tiny", str(tmp_path / "tiny"), "llama", "float32")
    assert (files.vocab_size, files.tokenizer_size, files.eos_token_ids, files.bos_token_id, files.add_bos) == (VOCAB, 261, (EOS,), BOS, False)
    assert files.has_chat_template
    assert files.weights_version.startswith("tiny@")
    assert Path(files.small_dir).is_relative_to(tmp_path / "cache" / "small")
    assert {"tokenizer.json", "config.json", "chat_template.jinja", "manifest.json"} <= {file.name for file in Path(files.small_dir).iterdir()}


def test_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_of(random_llama(tmp_path / "hf"), tmp_path / "tiny.gguf", "Q8_0")
    files = found(path, tmp_path / "cache")
    assert (files.kind, files.name, files.quantization, files.context_length, files.vocab_size) == ("gguf", "tiny", "Q8_0", 2048, VOCAB)
    assert (files.eos_token_ids, files.bos_token_id, files.has_chat_template) == ((EOS,), BOS, True)
    tokenizer = load_tokenizer(Path(files.small_dir))
    assert tokenizer.decode(tokenizer.encode("hi there <|end|>", False), False) == "hi there <|end|>"
    assert found(tmp_path, tmp_path / "cache") == files, "a directory with one GGUF file is that file"


def test_dummy(tmp_path: Path) -> None:
    files = found("dummy", tmp_path)
    assert (files.kind, files.vocab_size, files.bos_token_id, files.eos_token_ids) == ("dummy", 258, 256, (257,))
    small = Path(files.small_dir)
    tokenizer = load_tokenizer(small)
    text = "Aé 你\n\x00"
    assert tokenizer.encode(text, True) == list(text.encode())
    assert tokenizer.decode(list(range(256)), False) == bytes(range(256)).decode(errors="replace")
    template = ChatTemplate.load(small, None)
    assert template is not None
    assert template.render([{"role": "user", "content": "one"}, {"role": "user", "content": " two"}]) == "one two"


def test_small_files_are_repaired_and_never_shared_by_other_tokenizers(tmp_path: Path) -> None:
    path, cache = permutation_llama(tmp_path / "m"), tmp_path / "cache"
    first = found(path, cache)
    damaged = Path(first.small_dir) / "tokenizer.json"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    assert found(path, cache) == first
    assert damaged.read_bytes() == whole
    (path / "chat_template.jinja").write_text("other")
    second = found(path, cache)
    assert second.small_dir != first.small_dir
    assert second.weights_version == first.weights_version
    assert small_files.is_whole(Path(first.small_dir))
    assert not [file for file in (cache / "small").iterdir() if file.name.startswith(".")]


def test_weights_version_follows_name_and_header(tmp_path: Path) -> None:
    one, same, other = (random_llama(tmp_path / name / "m", layers=layers) for name, layers in (("a", 1), ("b", 1), ("c", 2)))
    versions = [found(path, tmp_path / "cache").weights_version for path in (one, same, other)]
    assert versions[0] == versions[1] != versions[2]


def test_no_chat_template(tmp_path: Path) -> None:
    assert not found(permutation_llama(tmp_path / "m", chat=False), tmp_path / "cache").has_chat_template


def test_chat_template_of_the_operator(tmp_path: Path) -> None:
    path = permutation_llama(tmp_path / "m", chat=False)
    (tmp_path / "good.jinja").write_text("{{ messages[0]['content'] }}")
    (tmp_path / "bad.jinja").write_text("line one\n{% for %}\n")
    assert found(path, tmp_path / "cache", chat_template=str(tmp_path / "good.jinja")).has_chat_template
    with pytest.raises(ConfigError, match=r"bad\.jinja:2"):
        found(path, tmp_path / "cache", chat_template=str(tmp_path / "bad.jinja"))
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        found(path, tmp_path / "cache", chat_template=str(tmp_path / "missing.jinja"))


def test_tokenizer_of_the_operator(tmp_path: Path) -> None:
    path, other = permutation_llama(tmp_path / "m"), permutation_llama(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 261, "content": "<|more|>"})
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert found(path, tmp_path / "cache", tokenizer_path=str(other)).tokenizer_size == 262
    assert found(path, tmp_path / "cache").tokenizer_size == 261
    with pytest.raises(ConfigError, match="no such file"):
        found(path, tmp_path / "cache", tokenizer_path=str(tmp_path / "nowhere"))


def test_a_missing_parameter_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(random_llama(tmp_path / "m", layers=1))
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    with pytest.raises(ConfigError) as caught:
        found(write_checkpoint(tmp_path / "bad", config, tensors), tmp_path / "cache")
    assert any("no file provides the tensor 'model.layers.0.mlp.up_proj.weight'" in fault for fault in caught.value.faults)
    assert any("'model.norm.weight' has shape [63], the configuration says [64]" in fault for fault in caught.value.faults)
    assert len(caught.value.faults) == 2


def test_faults_of_the_directory(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ConfigError, match=r"no such file or directory, and not the name of an embedded model \(smollm2-135m-instruct\)"):
        found(tmp_path / "nowhere", cache)
    with pytest.raises(ConfigError, match="llmd pull smollm2-135m-instruct"):
        found("smollm2-135m-instruct", cache)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        found(tmp_path / "empty", cache)
    path = random_llama(tmp_path / "m", layers=1)
    (path / "tokenizer.json").unlink()
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ConfigError) as caught:
        found(path, cache)
    assert len(caught.value.faults) == 2


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", layers=1)
    good = json.loads((path / "tokenizer.json").read_text())
    many = [{**good["added_tokens"][0], "id": id, "content": f"<{id}>"} for id in range(256, VOCAB + 1)]
    (path / "tokenizer.json").write_text(json.dumps({**good, "added_tokens": many}))
    with pytest.raises(ConfigError, match="do not belong together"):
        found(path, tmp_path / "cache")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=str(path)):
        found(path, tmp_path / "cache")
    (path / "tokenizer.json").write_text(json.dumps({**good, "normalizer": {"type": "Replace", "pattern": {"String": "o"}, "content": "0"}}))
    with pytest.raises(ConfigError, match="does not give back the sentence"):
        found(path, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_a_resource_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ResourceError, match="cannot write"):
        found("dummy", tmp_path / "cache")


@pytest.mark.parametrize(
    ("number", "status"), [(errno.EACCES, 78), (errno.EPERM, 78), (errno.ENAMETOOLONG, 78), (errno.EMFILE, 71), (errno.EIO, 71)], ids=errno.errorcode.get
)
@pytest.mark.parametrize("at", ["is_dir", "exists", "read_bytes"])
def test_what_the_system_refuses_is_told_under_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int, at: str) -> None:
    path = random_llama(tmp_path / "m")

    def refuse(self: Path) -> bool:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, at, refuse)
    with pytest.raises((ConfigError, ResourceError)) as caught:
        found(path, tmp_path / "cache")
    assert caught.value.exit_status == status
    assert caught.value.message.startswith(f"model.path: {path}: ") and os.strerror(number) in caught.value.message
    if at == "is_dir":
        with pytest.raises((ConfigError, ResourceError), match=f"^model.tokenizer_path: {path}: "):
            found("dummy", tmp_path / "cache", tokenizer_path=str(path))


def test_a_name_that_is_too_long_for_the_system_is_no_internal_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model.path: .*too long"):
        found(tmp_path / ("x" * 300), tmp_path / "cache")


def test_tensors_that_nobody_would_use_are_faults(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(random_llama(tmp_path / "whole"))
    layers = config["num_hidden_layers"]
    fewer = write_checkpoint(tmp_path / "fewer", {**config, "num_hidden_layers": layers - 1}, tensors)
    biased = write_checkpoint(tmp_path / "biased", config, {**tensors, "model.layers.0.self_attn.q_proj.bias": tensors["model.norm.weight"]})
    gguf = gguf_of(write_checkpoint(tmp_path / "hf", config, tensors), tmp_path / "m.gguf", "Q8_0")
    data = gguf.read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    assert data.count(key + struct.pack("<I", layers)) == 1
    gguf.write_bytes(data.replace(key + struct.pack("<I", layers), key + struct.pack("<I", layers - 1)))
    for path, name in ((fewer, f"model.layers.{layers - 1}."), (biased, "model.layers.0.self_attn.q_proj.bias"), (gguf, f"blk.{layers - 1}.")):
        with pytest.raises(ConfigError) as caught:
            found(path, tmp_path / "cache")
        assert all((f"tensor '{name}" in fault and "would not be used" in fault) or "more such faults" in fault for fault in caught.value.faults)


def test_tensors_that_are_known_to_be_superfluous_do_no_harm(tmp_path: Path) -> None:
    config, tensors = read_checkpoint(random_llama(tmp_path / "whole"))
    tied = {**config, "tie_word_embeddings": True}
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": tensors["model.norm.weight"][:8]}
    assert found(write_checkpoint(tmp_path / "m", tied, {**tensors, **extra}), tmp_path / "cache").name == "m"


def test_small_files_go_to_the_first_place_that_can_be_written_unless_the_cache_has_them(tmp_path: Path) -> None:
    path, cache = random_llama(tmp_path / "m"), tmp_path / "cache"
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file", tmp_path / "second"]
    assert Path(model_files(ModelArgs(path=str(path)), cache, places).small_dir).is_relative_to(tmp_path / "second" / "small")
    assert not cache.exists()
    with pytest.raises(ResourceError, match="file"):
        model_files(ModelArgs(path=str(path)), cache, places[:1])
    kept = found(path, cache).small_dir
    assert Path(kept).is_relative_to(cache) and model_files(ModelArgs(path=str(path)), cache, places).small_dir == kept


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("eos_token_id", VOCAB, f"eos_token_id: {VOCAB} is not in the vocabulary of {VOCAB}"),
        ("eos_token_id", [EOS, -1], "eos_token_id: -1 is not in the vocabulary"),
        ("eos_token_id", "</s>", "eos_token_id: expected the id of a token, got '</s>'"),
        ("bos_token_id", 10**9, "bos_token_id: 1000000000 is not in the vocabulary"),
        ("bos_token_id", True, "bos_token_id: expected the id of a token, got True"),
    ],
)
def test_ids_that_no_token_has_are_faults(tmp_path: Path, key: str, value: Any, words: str) -> None:
    config, tensors = read_checkpoint(random_llama(tmp_path / "whole"))
    bad = write_checkpoint(tmp_path / "m", {**config, key: value}, tensors)
    with pytest.raises(ConfigError) as caught:
        found(bad, tmp_path / "cache")
    assert [fault for fault in caught.value.faults if fault == f"{bad}/config.json: {words}" or words in fault]
    good = write_checkpoint(tmp_path / "g", config, tensors)
    (good / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError, match="generation_config"):
        found(good, tmp_path / "cache")


def test_ids_of_a_gguf_file_that_no_token_has_are_faults(tmp_path: Path) -> None:
    gguf = gguf_of(random_llama(tmp_path / "hf"), tmp_path / "m.gguf", "Q8_0")
    key = b"tokenizer.ggml.eos_token_id" + struct.pack("<I", 4)
    data = gguf.read_bytes()
    at = data.index(key) + len(key)
    gguf.write_bytes(data[:at] + struct.pack("<I", VOCAB) + data[at + 4 :])
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.eos_token_id: {VOCAB} is not in the vocabulary of {VOCAB}"):
        found(gguf, tmp_path / "cache")
