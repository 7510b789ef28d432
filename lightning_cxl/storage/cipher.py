"""Encryption of records, so that what lies on drives tells nothing to who has no key.

[Note: Encryption at rest]
AES-XTS, which encrypts a block at its place and needs no more room. With one key, the same place (tweak) must never be
used for two different contents. So each run has a key of its own, derived from the user's key and a random salt, and
numbers its writes: the tweak of a unit of a chunk is the number of the write, the drive, and the block in the record's
part. Nothing about this has to be written down before it is used, also when a run is killed: the next one has another
salt. A generation keeps salt and number of each record that it names.

XTS hides contents and does not prove who wrote them. The checksum is over encrypted bytes, so it tells nothing about
contents; it finds damage, not somebody who changes drive and manifest on purpose.
"""

import secrets
import struct
from typing import TYPE_CHECKING

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.storage.drive import BLOCK_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.modes import XTS

_UNIT_BYTES = 2**20  # at most 16 MiB, so says the standard of XTS
_SALT_BYTES = 16
KEY_BYTES = (32, 64)


class Seal:
    """How one write of one record is encrypted.

    Args:
        key: of the run.
        number: of the write.
        base: offset of the record's version on every drive.
    """

    def __init__(self, key: bytes, number: int, base: int) -> None:
        self._key = key
        self._number = number
        self._base = base

    def encrypt(self, drive: int, offset: int, source: memoryview, target: memoryview) -> None:
        """Write what lies at `offset` of a drive to `target`, encrypted."""
        for start in range(0, source.nbytes, _UNIT_BYTES):
            unit = slice(start, start + _UNIT_BYTES)
            self._cipher(drive, offset + start).encryptor().update_into(source[unit], target[unit])

    def decrypt(self, drive: int, offset: int, view: memoryview) -> None:
        """Replace what was read at `offset` of a drive by what was encrypted."""
        for start in range(0, view.nbytes, _UNIT_BYTES):
            unit = view[start : start + _UNIT_BYTES]
            self._cipher(drive, offset + start).decryptor().update_into(unit, unit)

    def _cipher(self, drive: int, offset: int) -> "Cipher[XTS]":
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES
        from cryptography.hazmat.primitives.ciphers.modes import XTS

        block = (offset - self._base) // BLOCK_BYTES
        return Cipher(AES(self._key), XTS(struct.pack("<QQ", self._number, drive << 48 | block)))


class Sealer:
    """Makes the seals of a run.

    Args:
        key: the user's, 32 bytes (AES-128) or 64 (AES-256), random.

    Raises:
        ConfigError: a key of another size.
        UnsupportedError: the package `cryptography` is missing.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) not in KEY_BYTES:
            raise ConfigError(
                f"a key for storage has 32 bytes (AES-128) or 64 bytes (AES-256), all random, got {len(key)} bytes"
            )
        self._key = key
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._run_key = self._derive(self._salt, b"records")
        self._num_writes = 0

    def new(self) -> str:
        """Return the name of a seal that was never used: salt and number. Not thread-safe."""
        self._num_writes += 1
        return f"{self._salt.hex()}:{self._num_writes}"

    def seal(self, name: str, base: int) -> Seal:
        """Return the seal of this name, of this run or an earlier one, for a record at `base` of every drive."""
        salt, number = name.split(":")
        own = salt == self._salt.hex()
        return Seal(self._run_key if own else self._derive(bytes.fromhex(salt), b"records"), int(number), base)

    def check(self) -> str:
        """Return what is the same for the same key and tells nothing about it."""
        return self._derive(b"", b"check")[:_SALT_BYTES].hex()

    def _derive(self, salt: bytes, use: bytes) -> bytes:
        try:
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ImportError as error:
            raise UnsupportedError(
                "encrypting storage needs the package `cryptography`: install it with `pip install cryptography`"
            ) from error
        return HKDF(SHA256(), len(self._key), salt, b"lightning_cxl storage: " + use).derive(self._key)
