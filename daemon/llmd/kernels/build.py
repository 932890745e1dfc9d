"""Compiles the native kernels into one shared library, `libllmd_kernels.so` beside this file. Standard library only: `setup.py` runs it on its own.

`src/*.cpp` is compiled once; `src/isa/*.cpp`, the kernels themselves, once per instruction set, and `src/amx/*.cpp` once more for those with AMX (src/isa.h).
`python -m llmd.kernels.build` builds in place.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = "libllmd_kernels.so"

# A product and a sum are fused only where a kernel says so, and nothing is reordered: a row's result must not depend on the code that computes it.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
]
# GCC takes its own AVX-512 intrinsics for uninitialized (PR 105593).
WARNINGS = ["-Wall", "-Wextra", "-Wno-ignored-attributes", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
ISA_FLAGS = {
    "scalar": ["-march=x86-64"],
    "avx2": ["-march=x86-64", "-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-march=x86-64", "-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
}


class BuildError(Exception):
    """There is no library; the text says why."""


def find_compiler() -> list[str]:
    """`$CXX` (which may carry arguments), else g++, else clang++."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        return chosen
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler (g++ or clang++; $CXX names another)")


def build(target: Path, *, jobs: int = 2) -> None:
    """Compiles to `target`, which appears whole or not at all. Raises BuildError."""
    if platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"the native kernels are for x86-64, not {platform.machine()}")
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="llmd-kernels-") as scratch:
        commands = list(_commands(compiler, Path(scratch)))
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(_run, commands))
        _check_unshared(sorted(Path(scratch).glob("*.a*.o")))
        linked = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            objects = [command[-1] for command in commands]
            exports = Path(scratch, "exports.map")
            exports.write_text("{ global: llmd_*; local: *; };\n")
            _run([*compiler, "-shared", "-pthread", "-static-libgcc", f"-Wl,--version-script={exports}", "-Wl,-z,now", "-Wl,-s", *objects, "-o", str(linked)])
            linked.replace(target)
        finally:
            linked.unlink(missing_ok=True)


def _commands(compiler: list[str], scratch: Path) -> list[list[str]]:
    """One compilation each; the object is the last word. The long ones come first."""
    flags = [*FLAGS, *WARNINGS]
    kernels = sorted((HERE / "src" / "isa").glob("*.cpp"))
    isa = [
        [*compiler, *flags, *ISA_FLAGS[name], f"-DLLMD_ISA_NS={name}", "-c", str(source), "-o", str(scratch / f"{source.stem}.{name}.o")]
        for name in ("avx512", "avx2", "scalar")
        for source in kernels
    ]
    isa += [
        [*compiler, *flags, *ISA_FLAGS["avx512"], "-DLLMD_ISA_NS=amx", "-c", str(source), "-o", str(scratch / f"{source.stem}.amx.o")]
        for source in sorted((HERE / "src" / "amx").glob("*.cpp"))
    ]
    plain = [
        [*compiler, *flags, *ISA_FLAGS["scalar"], "-c", str(source), "-o", str(scratch / f"{source.stem}.o")] for source in sorted((HERE / "src").glob("*.cpp"))
    ]
    return isa + plain


def _check_unshared(objects: list[Path]) -> None:
    """Kernels hold no function that the linker may share (src/isa.h): the copy kept could be one that the CPU does not have the instructions for."""
    if not shutil.which("nm"):
        return
    for path in objects:
        names = subprocess.run(["nm", "-C", "--defined-only", str(path)], capture_output=True, text=True, check=False).stdout
        if shared := [line.split(maxsplit=2)[2] for line in names.splitlines() if line.split(maxsplit=2)[1] in "WVu"]:
            raise BuildError(f"{path.stem} holds functions that may be shared between instruction sets: {', '.join(shared)}")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise BuildError(f"{shlex.join(command)}\n{done.stderr.strip()}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)


if __name__ == "__main__":
    try:
        build(HERE / LIBRARY)
    except BuildError as error:
        sys.exit(f"error: {error}")
