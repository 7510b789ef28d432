"""The build: reasons for a skip, errors, and two processes at once."""

import multiprocessing

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
