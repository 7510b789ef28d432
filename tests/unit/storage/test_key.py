"""The key of the tier ssd: from a file or a variable, never shown, and refused where it protects nothing."""

import os
import secrets
import subprocess
import traceback

import pytest

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError
from lightning_cxl.storage.key import read_key

KEY = secrets.token_bytes(64)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "ssd.key"
    path.touch(0o600)
    path.write_bytes(KEY)
    return path


def refused(source, folders=(), match=""):
    """Return what the error says, with everything that led to it."""
    with pytest.raises(ConfigError, match=match) as caught:
        read_key(str(source), folders)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("size", [32, 64])
def test_a_key_is_read_from_a_file_or_a_variable(key_file, monkeypatch, size):
    key_file.write_bytes(KEY[:size])
    monkeypatch.setenv("SSD_KEY", KEY[:size].hex())
    assert read_key(str(key_file), []) == read_key("$SSD_KEY", []) == KEY[:size]


def test_files_are_found_from_here_and_from_home(key_file, monkeypatch):
    monkeypatch.chdir(key_file.parent)
    monkeypatch.setenv("HOME", str(key_file.parent))
    assert read_key("./ssd.key", []) == read_key("~/ssd.key", []) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_file_that_others_may_use_is_refused(key_file, mode):
    key_file.chmod(mode)
    text = refused(key_file, match=f"has mode {mode:04o}.*chmod 600 {key_file}")
    assert "secrets" not in text  # the advice is not another key
    key_file.chmod(0o400)
    assert read_key(str(key_file), []) == KEY


@pytest.mark.parametrize("size", [0, 31, 33, 65, 640])
def test_other_lengths_are_refused(key_file, monkeypatch, size):
    contents = (KEY * 10)[:size]
    key_file.write_bytes(contents)
    refused(key_file, match="not of 64 or 32")
    monkeypatch.setenv("SSD_KEY", contents.hex())
    refused("$SSD_KEY", match="not of 64 or 32")


def test_digits_in_a_file_are_refused(key_file):
    """32 bytes as digits have the length of a key of 64 bytes, which they are not."""
    key_file.write_text(KEY[:32].hex())
    refused(key_file, match="holds text: a file has the bytes")


def test_a_key_that_is_not_random_is_refused(key_file, monkeypatch):
    key_file.write_bytes(bytes(64))
    refused(key_file, match="not random")
    monkeypatch.setenv("SSD_KEY", "0123456789abcdef" * 8)
    refused("$SSD_KEY", match="not random")


@pytest.mark.parametrize("text", ["swordfish", "AbCd+/" * 10 + "==", KEY.hex()[:-1]], ids=["word", "base64", "odd"])
def test_a_variable_that_has_no_digits_is_refused_and_not_shown(monkeypatch, text):
    monkeypatch.setenv("SSD_KEY", text)
    assert text not in refused("$SSD_KEY", match="variable SSD_KEY.*not written in hexadecimal digits")


def test_what_is_missing_is_said_with_a_command_that_makes_a_key(tmp_path, monkeypatch):
    """And the commands work as they are."""
    monkeypatch.delenv("SSD_KEY", raising=False)
    for source, match in (("$SSD_KEY", "SSD_KEY .* is not set"), (tmp_path / "new.key", "No such file")):
        with pytest.raises(ConfigError, match=match) as caught:
            read_key(str(source), [])
        command = str(caught.value).split("Make one with `")[1].split("`")[0]
        shown = subprocess.run(["sh", "-c", f"{command}; echo $SSD_KEY"], capture_output=True, text=True, check=True)
        if source == "$SSD_KEY":
            monkeypatch.setenv("SSD_KEY", shown.stdout.strip())
        assert len(read_key(str(source), [])) == 64


def test_a_key_in_the_folder_that_it_protects_is_refused(key_file, tmp_path):
    link = tmp_path.parent / f"{tmp_path.name}-link.key"
    link.symlink_to(key_file)
    for path in (key_file, link):
        refused(path, [tmp_path.parent / "other", tmp_path], match="which it protects")
    assert read_key(str(link), [tmp_path.parent / "other"]) == KEY


def test_a_pipe_and_a_folder_are_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, match in ((tmp_path / "pipe", "is no file"), (tmp_path, "Is a directory")):
        refused(path, match=match)


@pytest.mark.parametrize(
    "value",
    [KEY, KEY.hex(), KEY[:32].hex(), "secret.key", "$", "$a b", "", 5, ["$SSD_KEY"]],
    ids=["bytes", "digits", "less digits", "name", "no name", "space", "nothing", "number", "list"],
)
def test_an_option_that_may_be_a_key_is_refused_and_not_shown(value):
    with pytest.raises(ConfigError, match="never the key itself") as caught:
        OffloadConfig(tiers={"ssd": {"key": value, "pth": "typing error"}})
    shown = "".join(traceback.format_exception(caught.value))
    assert len(str(value)) < 4 or str(value) not in shown
