"""Encryption of records: nothing readable on drives, no tweak twice, and only the key brings it back."""

import re
import secrets
import sys
from pathlib import Path

import pytest

from lightning_cxl.errors import ConfigError, StorageError, UnsupportedError
from lightning_cxl.storage.cipher import Seal, Sealer
from lightning_cxl.storage.store import Store
from lightning_cxl.storage.veil import Veil
from tests.storage_cases import BLOCK, BUDGET, CHUNK, bytes_of, fill, folders, get, memory_of, put

KEY = secrets.token_bytes(64)


def opened(path, key=KEY, keeps=True):
    return Store(folders(path, 2), budget_bytes=BUDGET, keeps=keeps, key=key, chunk_bytes=CHUNK)


def on_drives(path):
    return b"".join(file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file())


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("nbytes", [5, 3 * CHUNK, 5 * CHUNK + 9])
def test_what_was_written_is_read_and_nothing_of_it_lies_on_a_drive(tmp_path, size, nbytes):
    store = opened(tmp_path, secrets.token_bytes(size))
    record = store.reserve("state", nbytes)
    for seed in range(2):
        memory = memory_of(record.padded_nbytes)
        contents = fill(memory, seed)
        store.write(record, memory).wait_host()
        assert bytes_of(memory) == contents  # the caller's memory is as it was
        assert get(store, record) == contents
        if seed == 0:
            store.commit({})
        raw = on_drives(tmp_path)
        assert not any(contents[start : start + 16] in raw for start in range(0, len(contents), 512))
    store.close()


def test_equal_bytes_are_never_equal_on_drives(tmp_path):
    """Neither at other places, nor written again to the same one, nor by another run with the same key."""
    blocks = []
    for _ in range(2):
        store = opened(tmp_path, keeps=False)
        for name in ("one", "other"):
            record = store.reserve(name, 4 * CHUNK)
            for _ in range(2):
                store.write(record, memory_of(record.padded_nbytes)).wait_host()  # zeros
                for part in folders(tmp_path, 2):
                    (file,) = part.glob("*.data")
                    contents, start = file.read_bytes(), record.versions[0]
                    blocks += [contents[at : at + BLOCK] for at in range(start, start + record.part_nbytes, BLOCK)]
        store.close()
    assert len(set(blocks)) == len(blocks) == 2 * 2 * 2 * 2 * 2 * CHUNK // BLOCK


def test_a_seal_is_what_the_standard_says():
    """XEX with the tweak of IEEE 1619, block by block, by AES alone."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import ECB

    def aes(key, block):
        return Cipher(AES(key), ECB()).encryptor().update(block)

    source, target = bytearray(secrets.token_bytes(BLOCK)), bytearray(BLOCK)
    Seal(KEY, 7, BLOCK).encrypt(3, 6 * BLOCK, memoryview(source), memoryview(target))
    tweak = int.from_bytes(aes(KEY[32:], (7).to_bytes(8, "little") + (3 << 48 | 5).to_bytes(8, "little")), "little")
    for start in range(0, BLOCK, 16):
        mask = tweak.to_bytes(16, "little")
        mixed = bytes(a ^ b for a, b in zip(source[start : start + 16], mask, strict=True))
        expected = bytes(a ^ b for a, b in zip(aes(KEY[:32], mixed), mask, strict=True))
        assert target[start : start + 16] == expected
        tweak = (tweak << 1 ^ (0x87 if tweak >> 127 else 0)) & (1 << 128) - 1


def test_large_chunks_are_cut_into_units_alike_by_both_directions():
    contents = fill(memory_of(5 << 20), 1)
    views = [memoryview(bytearray(contents)), memoryview(bytearray(5 << 20))]
    seal = Seal(KEY, 1, 0)
    seal.encrypt(0, 0, *views)
    assert bytes(views[1]) != contents
    seal.decrypt(0, 0, views[1])
    assert bytes(views[1]) == contents


def test_a_generation_comes_back_with_the_key_only(tmp_path):
    store = opened(tmp_path)
    record = store.reserve("state", 3 * CHUNK)
    first = put(store, record, 1)
    store.settle(store.commit({"step": 1}))
    store.close()

    with pytest.raises(ConfigError, match="is encrypted, and this run has no key"):
        opened(tmp_path, None)
    with pytest.raises(ConfigError, match="is encrypted, and this run has another key"):
        opened(tmp_path, secrets.token_bytes(64))

    store = opened(tmp_path)
    record = store.reserve("state", 3 * CHUNK)
    store.restore(1)
    assert get(store, record) == first
    second = put(store, record, 2)
    store.commit({"step": 2})
    store.close()

    store = opened(tmp_path)  # two generations, written by two runs
    record = store.reserve("state", 3 * CHUNK)
    for number, contents in ((1, first), (2, second), (1, first)):
        store.restore(number)
        assert get(store, record) == contents
    store.close()


def test_what_was_not_encrypted_is_not_opened_with_a_key(tmp_path):
    store = opened(tmp_path, None)
    store.reserve("state", 1)
    store.commit({})
    store.close()
    with pytest.raises(ConfigError, match="is not encrypted, and this run has a key"):
        opened(tmp_path)


def shows_no_number(window):
    return set(bytes_of(window)) == {0xFF}


def test_a_window_shows_what_was_written_when_someone_looks(tmp_path):
    store = opened(tmp_path)
    record = store.reserve("state", 3 * CHUNK)
    window = store.window(record)
    assert shows_no_number(store.look(record))
    for seed in range(2):
        contents = put(store, record, seed)
        assert shows_no_number(window)
        assert store.look(record) is window and bytes_of(window) == contents
    store.commit({})
    put(store, record, 3)
    store.look(record)
    store.restore(1)
    assert shows_no_number(window)
    store.look(record)
    store.close()
    assert bytes_of(window) == contents


def test_who_looks_twice_keeps_what_was_written_to_the_window(tmp_path):
    store = opened(tmp_path)
    record = store.reserve("state", BLOCK)
    put(store, record, 1)
    fill(store.look(record), 2)
    mine = bytes_of(store.window(record))
    num_read = store.stats()["read_bytes"]
    assert bytes_of(store.look(record)) == mine and store.stats()["read_bytes"] == num_read
    store.close()


def test_a_window_covered_after_a_write_shows_the_new_bytes_when_someone_looks_again(tmp_path):
    """The write ends while the look still waits: what was read is old, and is covered."""
    store = opened(tmp_path)
    record = store.reserve("state", BLOCK)
    put(store, record, 1)
    read = store.read

    def read_and_be_overtaken(*args):
        transfer = read(*args)
        transfer.wait_host()
        put(store, record, 2)
        return transfer

    store.read = read_and_be_overtaken
    assert shows_no_number(store.look(record))
    store.read = read
    store.look(record)
    assert bytes_of(store.window(record)) == get(store, record)
    store.close()


def test_where_a_window_cannot_be_covered_nothing_is_written(tmp_path, monkeypatch):
    """Memory that is written must not be given back while the write goes on."""
    store = opened(tmp_path, keeps=False)
    record = store.reserve("state", BLOCK)
    contents = put(store, record, 1)
    store.look(record)

    def fail(*_):
        raise StorageError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Veil, "cover", fail)
        with pytest.raises(StorageError, match="no memory"):
            put(store, record, 2)
    store.wait()
    assert get(store, record) == contents
    store.close()


@pytest.mark.parametrize("most_bytes", [1, 1 << 40], ids=["many pieces", "one piece"])
def test_a_veil_covers_windows_of_every_size(most_bytes, monkeypatch):
    monkeypatch.setattr("lightning_cxl.storage.veil._LEAST_BYTES", 2 * BLOCK)
    veil = Veil(most_bytes)
    memories = [memory_of(num_blocks * BLOCK) for num_blocks in (1, 2, 7, 3)]
    for memory in memories:
        fill(memory, 1)
        veil.cover(memory.parent)
    for memory in memories:
        assert shows_no_number(memory)
    veil.close()
    fill(memories[2], 2)
    assert not shows_no_number(memories[2])
    assert shows_no_number(memories[0]) and shows_no_number(memories[3]), "who writes to one window changes others"


def test_a_veil_of_a_tebibyte_takes_few_ranges_of_addresses():
    """The kernel allows 65,530 in all."""
    veil, memory = Veil(1 << 40), memory_of(64 << 30)
    veil.cover(memory.parent)
    begins = [int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()]
    assert sum(0 <= begin - memory.address < memory.nbytes for begin in begins) == (64 << 30) // (128 << 20)
    veil.close()


def test_looking_without_a_key_is_the_window(tmp_path):
    store = opened(tmp_path, None)
    record = store.reserve("state", BLOCK)
    contents = put(store, record, 1)
    assert bytes_of(store.look(record)) == contents and store.stats()["read_bytes"] == 0
    store.close()


def test_damage_of_encrypted_bytes_is_found(tmp_path):
    store = opened(tmp_path)
    record = store.reserve("state", 2 * BLOCK)
    put(store, record, 1)
    (file,) = (tmp_path / "drive1").glob("*.data")
    with open(file, "r+b") as other:
        other.seek(record.versions[0])
        byte = other.read(1)
        other.seek(record.versions[0])
        other.write(bytes([byte[0] ^ 1]))
    with pytest.raises(StorageError, match="is damaged"):
        get(store, record)
    window = store.window(record)
    with pytest.raises(StorageError, match="is damaged"):
        store.look(record)
    assert shows_no_number(window), "the window shows what is damaged"
    store.close()


def test_keys_of_other_sizes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"32 bytes .* or 64 bytes"):
        opened(tmp_path, b"secret")
    assert not list(tmp_path.iterdir())


def test_what_is_kept_about_a_key_tells_nothing_about_it():
    sealer = Sealer(KEY)
    assert sealer.check() == Sealer(KEY).check() != Sealer(secrets.token_bytes(64)).check()
    assert bytes.fromhex(sealer.check()) not in KEY
    names = [sealer.new() for _ in range(3)]
    assert len(set(names)) == 3 and all(re.fullmatch(r"[0-9a-f]{32}:\d+", name) for name in names)


def test_without_the_package_a_key_is_refused_and_the_rest_works(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hashes", None)
    with pytest.raises(UnsupportedError, match="pip install -U cryptography"):
        opened(tmp_path)
    opened(tmp_path, None).close()


def test_a_package_that_is_too_old_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("cryptography.__version__", "42.0.8")
    with pytest.raises(UnsupportedError, match=r"version 43 or newer \(cryptography 42\.0\.8 is too old\)"):
        opened(tmp_path)
    assert not list(tmp_path.iterdir())
