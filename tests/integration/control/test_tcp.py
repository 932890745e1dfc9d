"""The admin plane over TCP: the same answers, for whoever has the key; audited with the key's name and the caller's address."""

from __future__ import annotations

import os
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from llmctl.main import main
from llmd.config.server_args import AdminArgs, HttpArgs
from tests.daemon import SLOW, free_port
from tests.integration.control.harness import Stage, stage, wait_for


@pytest.fixture(params=["plain", "tls"])
def remote(request: pytest.FixtureRequest) -> Iterator[tuple[Stage, str, Path, Path | None]]:
    """(stage, URL, key file, certificate)."""
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory, stage(Path(directory)) as made:
        key = Path(directory) / "key"
        key.write_text("s3cret-key\n")
        key.chmod(0o600)
        cert, private = (Path(directory) / "cert.pem", Path(directory) / "key.pem") if request.param == "tls" else (None, None)
        if cert is not None:
            command = [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-addext",
                "subjectAltName=IP:127.0.0.1",
            ]
            subprocess.run([*command, "-keyout", str(private), "-out", str(cert)], check=True, capture_output=True, timeout=60)
        port = free_port()
        admin = AdminArgs(group=None, listen=f"127.0.0.1:{port}", tls_cert=str(cert) if cert else None, tls_key=str(private) if private else None)
        args = msgspec.structs.replace(made.boot.args, admin=admin, http=HttpArgs(admin_key_file=str(key)))
        made.boot = msgspec.structs.replace(made.boot, args=args)
        made.boot.ports.boot.write_bytes(made.boot.dump())
        made.start_control()
        made.to_ready()
        yield made, f"{'https' if cert else 'http'}://127.0.0.1:{port}", key, cert


def test_only_the_key_opens_it_and_it_is_audited(
    remote: tuple[Stage, str, Path, Path | None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, url, key, cert = remote
    trust: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(cert)) if cert else True
    with httpx.Client(base_url=url, verify=trust, timeout=20 * SLOW, trust_env=False) as client:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret-key"}, {"Authorization": "Bearer"}):
            refused = client.get("/v1/status", headers=header)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        right = {"Authorization": "Bearer s3cret-key"}
        assert client.get("/v1/status", headers=right).json()["state"] == "ready"
        assert client.get("/v1/status", headers={**right, "Origin": "http://x"}).status_code == 403
        assert client.post("/v1/resume", headers=right).json()["by"] == {
            "uid": None, "gid": None, "pid": None, "loginuid": None, "key": "admin", "address": "127.0.0.1",
        }  # fmt: skip
        line = made.http.get("/v1/audit").json()["audit"][0]
        assert (line["key"], line["address"], line["uid"]) == ("admin", "127.0.0.1", None)
        key.write_text("another-key\n")
        assert client.get("/v1/status", headers=right).status_code == 401, "the file is read again"
        key.write_text("s3cret-key\n")
    if cert:
        assert main(["--url", url, "--key-file", str(key), "health"]) == 77, "a certificate that nobody vouches for"
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert main(["--url", url, "--key-file", str(key), "health"]) == 0
    assert main(["--url", url, "health"]) == 77
    assert main(["--url", url, "--key-file", str(key), "stop"]) == 2, "that one watches the process"
    assert made.log.read_text().count("refused for want of the admin key") == 1
    assert "s3cret" not in made.log.read_text() + "".join(capsys.readouterr())
    wait_for(lambda: os.path.exists(made.boot.ports.admin_socket), "the socket is there beside it")
