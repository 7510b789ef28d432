import os
import socket

import pytest

from lightning_cxl.config import cache_folder
from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.data import load_texts, stdlib_files, user_files


def test_stdlib_files_are_the_running_interpreters_sources_without_tests_and_packages():
    files = stdlib_files()
    assert os.__file__ in map(str, files)
    assert len(files) > 100
    assert not any({"site-packages", "test", "tests", "__pycache__"} & set(path.parts[-4:-1]) for path in files)


def test_stdlib_files_leaves_out_what_cannot_be_read(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("")
    assert stdlib_files(tmp_path) == [tmp_path / "good.py"]


def test_user_files_takes_paths_and_globs_and_counts_each_file_once(text_folder):
    one = text_folder / "00.txt"
    assert user_files(str(one)) == [one]
    assert len(user_files([f"{text_folder}/*.txt"])) == 6
    assert len(user_files([f"{text_folder}/**/*.txt", str(one)])) == 12


def test_a_user_file_that_is_not_text_is_named(text_folder):
    (text_folder / "picture.txt").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ConfigError, match=r"picture\.txt"):
        user_files(f"{text_folder}/*.txt")


def test_documents_are_whole_files_cached_in_our_folder_without_network(text_folder, cache, monkeypatch):
    def refuse(*_):
        raise AssertionError("used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    files = user_files(f"{text_folder}/**/*.txt")
    documents = load_texts(files)
    assert documents["text"][:] == [path.read_text() for path in files]
    assert cache_folder() == cache
    assert all(str(file["filename"]).startswith(str(cache)) for file in documents.cache_files)


@pytest.mark.parametrize("exists", [False, True])
def test_nobody_else_enters_the_cache_of_texts(tmp_path, exists):
    folder = cache_folder() / "datasets"
    if exists:
        folder.mkdir(mode=0o755, parents=True)
    (tmp_path / "a.txt").write_text("a secret")
    load_texts([tmp_path / "a.txt"])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(folder in path.parents for path in cache_folder().rglob("*.arrow"))
