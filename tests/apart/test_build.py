"""The build: reasons for a skip, errors, and two processes at once."""

import multiprocessing
import shutil

import pytest

from tests.apart import build

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Sources that are built in a moment, and a cache of their own."""
    for unit in build.UNITS:
        (tmp_path / "csrc" / unit).mkdir(parents=True)
        (tmp_path / "csrc" / unit / "one.cpp").write_text(f"int {unit}() {{ return 1; }}")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_here_it_can_be_built():
    assert build.why_unavailable() is None


def test_without_a_compiler_the_reason_says_so(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs a C++ compiler" in build.why_unavailable()


def test_without_headers_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(build, "include_paths", lambda: ["/nowhere"])
    assert "no headers in /nowhere" in build.why_unavailable()


def test_what_does_not_compile_is_an_error_and_leaves_nothing(tiny):
    (tiny / "csrc" / "runtime" / "two.cpp").write_text("int two() { return nothing; }")
    with pytest.raises(build.BuildError, match="nothing"):
        build.library()
    assert not list(tiny.glob("cache/apart/*.so")) and not list(tiny.glob("cache/apart/*.partial"))


def test_a_build_is_kept_and_a_change_compiles_its_unit_alone(tiny, monkeypatch):
    first = build.library()
    compiled = []
    make = build._make
    monkeypatch.setattr(build, "_make", lambda target, *args: (compiled.append(target.name), make(target, *args)))
    assert build.library() == first and not compiled
    (tiny / "csrc" / "runtime" / "one.cpp").write_text("int runtime() { return 2; }")
    second = build.library()
    assert second != first
    assert [name.split("-")[0] for name in compiled] == ["runtime", "apart"]


def test_processes_at_once_build_once(tiny, monkeypatch):
    make = build._make
    log = tiny / "log"

    def counted(target, *arguments):
        with log.open("a") as file:
            file.write(f"{target.name}\n")
        make(target, *arguments)

    monkeypatch.setattr(build, "_make", counted)
    children = [multiprocessing.get_context("fork").Process(target=build.library) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert len(log.read_text().split()) == len(build.UNITS) + 1
