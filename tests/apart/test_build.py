import multiprocessing

import pytest

from tests.apart import build


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_at_once_build_once_and_a_change_compiles_its_unit_alone(tmp_path, monkeypatch):
    log, make = tmp_path / "log", build._make
    for unit in build.UNITS:  # sources that are built in a moment
        (tmp_path / "csrc" / unit).mkdir(parents=True)
        (tmp_path / "csrc" / unit / "one.cpp").write_text(f"int {unit}() {{ return 1; }}")

    def counted(target, *arguments):
        with log.open("a") as file:
            file.write(f"{target.name.split('-')[0]}\n")
        make(target, *arguments)

    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_make", counted)
    children = [multiprocessing.get_context("fork").Process(target=build.library) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    first = build.library()
    assert sorted(log.read_text().split()) == sorted([*build.UNITS, "apart"])
    log.unlink()
    (tmp_path / "csrc" / "runtime" / "one.cpp").write_text("int runtime() { return 2; }")
    assert build.library() != first
    assert log.read_text().split() == ["runtime", "apart"]
