"""Files of API keys: every fault is told with its line, no secret is ever repeated, and a file that others could read is not used."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from llmd.config.check import load_checked
from llmd.config.keys import Key, digest_of, parse_admin_key, parse_keys, read_admin_key, read_keys
from llmd.errors import ConfigError

SECRET = "sk-very-secret-0123"
HEX = hashlib.sha256(SECRET.encode()).hexdigest()


def written(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_every_form_of_a_line() -> None:
    text = f"# keys of the team\n\nanna:{SECRET} rpm=60 tpm=100000 admin\n  bob:sha256:{hashlib.sha256(b'other').hexdigest().upper()}\tadmin\nc.d_e@f-g:a:b#c\n"
    assert parse_keys(text) == (
        Key("anna", digest_of(SECRET), 60, 100000, True),
        Key("bob", digest_of("other"), None, None, True),
        Key("c.d_e@f-g", digest_of("a:b#c")),
    )


def test_all_faults_come_with_their_lines_and_without_any_secret() -> None:
    lines = [
        SECRET,
        f":{SECRET}",
        f"an name:{SECRET}",
        f"a/b:{SECRET}",
        "short:",
        f"hex:sha256:{HEX[:-1]}",
        f"fine:{SECRET}",
        "fine:another-secret",
        f"same:sha256:{HEX}",
        "zero:z1 rpm=0",
        "minus:m1 rpm=-5",
        "odd:o1 superuser-secret",
        "umlaut:gehe\u00efm",
        "long:" + "x" * 513,
    ]
    with pytest.raises(ConfigError) as caught:
        parse_keys("\n".join(lines))
    numbers = [fault.partition(":")[0] for fault in caught.value.faults]
    assert numbers == [f"line {n}" for n in range(1, 15) if n != 7]
    text = "\n".join(caught.value.faults)
    assert SECRET not in text and HEX[:20] not in text and "secret" not in text


@pytest.mark.parametrize("text", ["", "\n# nothing\n"])
def test_a_file_without_keys_is_a_fault(text: str) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        parse_keys(text)


def test_the_admin_key_stands_alone() -> None:
    assert parse_admin_key(f"# the admin\n{SECRET}\n") == digest_of(SECRET) == parse_admin_key(f"sha256:{HEX}")
    for text in ("", "a\nb\n", "sha256:12", "two words"):
        with pytest.raises(ConfigError):
            parse_admin_key(text)


@pytest.mark.parametrize(("mode", "fine"), [(0o600, True), (0o640, True), (0o400, True), (0o644, False), (0o660, False), (0o604, False), (0o700, False)])
def test_only_owner_and_group_may_read_and_only_the_owner_write(tmp_path: Path, mode: int, fine: bool) -> None:
    path = written(tmp_path / "keys", f"a:{SECRET}\n", mode)
    if fine:
        assert len(read_keys(path)) == 1
    else:
        with pytest.raises(ConfigError, match=f"its mode is {mode:04o}"):
            read_keys(path)


def test_what_is_no_readable_file_is_said_to_be(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "not a file"), (fifo, "not a file")):
        with pytest.raises(ConfigError, match=why):
            read_keys(str(path))
        with pytest.raises(ConfigError, match=why):
            read_admin_key(str(path))
    (tmp_path / "bytes").write_bytes(b"a:\xff")
    (tmp_path / "bytes").chmod(0o600)
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_keys(str(tmp_path / "bytes"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", f"a:{SECRET}\n")
    os.chown(path, 4711, -1)
    with pytest.raises(ConfigError, match="uid 4711"):
        read_keys(path)


def faults(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "llmd.yaml"
    file.write_text(text)
    try:
        load_checked(str(file), [], {}, allow_failpoints=False)
    except ConfigError as error:
        return [fault.replace(f"{tmp_path}/", "") for fault in error.faults]
    return []


def test_the_start_reads_the_files_and_an_open_address_needs_them(tmp_path: Path) -> None:
    written(tmp_path / "good", f"a:{SECRET}\n")
    written(tmp_path / "bad", f"a:{SECRET}\nb\n", 0o600)
    written(tmp_path / "admin", f"{SECRET}\n", 0o644)
    assert faults(tmp_path, f"http: {{host: 0.0.0.0, api_keys_file: {tmp_path}/good}}\nobservability: {{metrics: {{require_key: true}}}}") == []
    assert faults(tmp_path, f"http: {{api_keys_file: {tmp_path}/bad, admin_key_file: {tmp_path}/admin}}") == [
        "llmd.yaml:1:23: http.api_keys_file: bad: line 2: expected NAME:KEY or NAME:sha256:HEX",
        f"llmd.yaml:1:{23 + len(f'{tmp_path}/bad, admin_key_file: ')}: http.admin_key_file: admin: its mode is 0644, but it holds keys: set it to 0600 or 0640",
    ]
    (found,) = faults(tmp_path, "http: {host: 0.0.0.0}")
    assert "http.api_keys_file" in found
    (found,) = faults(tmp_path, "observability: {metrics: {require_key: true}}")
    assert "needs http.api_keys_file" in found
