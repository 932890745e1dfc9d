"""Finding and loading the library, and choosing the instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmd.errors import ConfigError
from llmd.kernels import build
from llmd.kernels.shared_library import ISAS, PATH, LibraryMissing, choose_isa, library, load
from tests.unit.kernels import native

built = pytest.mark.skipif(library() is None, reason="the native kernels are not built")

SAY_ISA = "from llmd.kernels.shared_library import isa_name, library; print(isa_name(library()))"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment)


@built
@pytest.mark.parametrize("isa", native.isas())
def test_the_environment_forces_an_instruction_set(isa: str) -> None:
    done = python(SAY_ISA, LLMD_ISA=isa)
    assert (done.stdout.strip(), done.returncode) == (isa, 0), done.stderr


@built
def test_without_the_environment_it_is_the_best_one() -> None:
    assert python(SAY_ISA, LLMD_ISA="").stdout.strip() == native.isas()[-1]


@built
def test_an_unknown_instruction_set_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ConfigError, match="scalar, avx2, avx512"):
        choose_isa(native.lib(), "neon")


class ScalarOnly:
    """A library on a CPU that has neither AVX2 nor AVX-512."""

    def llmd_isa_set(self, isa: int) -> int:
        return 0 if isa == 0 else -1

    def llmd_isa_best(self) -> int:
        return 0


@pytest.mark.parametrize("isa", ISAS[1:])
def test_an_instruction_set_that_the_cpu_lacks_is_an_error(isa: str) -> None:
    with pytest.raises(ConfigError, match="no more than scalar"):
        choose_isa(ScalarOnly(), isa)  # type: ignore[arg-type]


def test_a_missing_library_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LibraryMissing, match=r"python -m llmd\.kernels\.build"):
        load(tmp_path / "none.so")


def test_a_file_that_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.so").write_bytes(b"not a library")
    with pytest.raises(LibraryMissing, match="do not load"):
        load(tmp_path / "bad.so")


@pytest.mark.parametrize(("version", "reason"), [(999, "ABI 999"), (1, "another build")])
def test_a_library_of_another_build_is_not_used(tmp_path: Path, version: int, reason: str) -> None:
    try:
        compiler = build.find_compiler()
    except build.BuildError:
        pytest.skip("no C++ compiler")
    source, target = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(f'extern "C" int llmd_abi_version() {{ return {version}; }}\n')
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    with pytest.raises(LibraryMissing, match=reason):
        load(target)


def test_a_build_without_a_compiler_fails_in_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    with pytest.raises(build.BuildError, match="no-such-compiler: No such file"):
        build.build(tmp_path / "kernels.so")
    assert not list(tmp_path.iterdir())


def test_another_machine_has_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(build.BuildError, match="x86-64, not aarch64"):
        build.build(tmp_path / "kernels.so")


@built
def test_loading_needs_neither_numpy_nor_torch() -> None:
    done = python("import sys; from llmd.kernels.shared_library import library; assert library(); print(sorted({'numpy', 'torch'} & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


@built
def test_kernels_of_one_instruction_set_are_not_shared_with_another() -> None:
    """Only our own C ABI is visible, so no function of the library can be replaced by another one's, nor the other way round."""
    names = subprocess.run(["nm", "-D", "--defined-only", str(PATH)], capture_output=True, text=True, check=False)
    if names.returncode:
        pytest.skip("no nm")
    assert all(line.split()[-1].startswith("llmd_") for line in names.stdout.splitlines())
