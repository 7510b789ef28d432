"""Encryption of records, so that what lies on drives tells nothing to who has no key.

[Note: Encryption at rest]
AES-XTS, which encrypts a block at its place and needs no more room. With one key, the same place (tweak) must never be
used for two different contents. So each run has a key of its own, derived from the user's key and a random salt, and
numbers its writes: the tweak of a unit of a chunk is the number of the write, the drive, and the block in the record's
part. Nothing about this has to be written down before it is used, also when a run is killed: the next one has another
salt. A generation keeps salt and number of each record that it names.

Windows cannot show what is encrypted, and zeros would pass for state. So every byte of a window is 0xFF: floating point
numbers then are not numbers, and 8-bit codes have scales that are none. All windows show one small file in memory
(`Veil`), so this takes no memory either. Who needs values looks (`Store.look`): they are decrypted into private pages
of the window, until the next write of the record begins. Who asks an optimizer for its state, in Python or for a
checkpoint that copies it, looks at all of it, if there is memory for that, and gets an error if not. Updates do not
look, they decrypt into slots; neither does a checkpoint that refers to the state, nor who resumes from one. At the end
of a run its state is decrypted to memory, where the user has it; where there is no memory for it the optimizer's state
is empty, a warning says so, and who asks for it gets an error. Who has kept a tensor of state from before a step reads
0xFF from it, and whatever is written to a tensor counts as a whole.

Not hidden: what records are called, their sizes and when they change, in the manifest; the weights, and in
`checkpoint="copy"` the state, in checkpoint files; memory, which the kernel may swap to a disk.

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
_LEAST_VERSION = 43  # of `cryptography`: older ones want more room for what they have encrypted
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
            from cryptography import __version__ as version
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF

            if int(version.partition(".")[0]) < _LEAST_VERSION:
                raise ImportError(f"cryptography {version} is too old")
        except ImportError as error:
            raise UnsupportedError(
                f"encrypting storage needs the package `cryptography`, version {_LEAST_VERSION} or newer ({error}): "
                f"`pip install -U cryptography`, or as a part of this one `pip install 'lightning_cxl[encryption]'`"
            ) from error
        return HKDF(SHA256(), len(self._key), salt, b"lightning_cxl storage: " + use).derive(self._key)
