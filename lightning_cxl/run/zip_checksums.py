"""`put_checksums`: the checksums of a zip file that torch has written without them."""

import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import BinaryIO

_BEHIND_DATA = b"PK\x07\x08"  # marks a checksum behind the data of its entry
_STEP_BYTES = 4 * 2**20


def put_checksums(file: BinaryIO, known: Mapping[tuple[int, int], int]) -> None:
    """Write the CRC-32 of every entry where a reader of zip files looks for it.

    Args:
        file: a complete zip file without compression, open for reading and writing.
        known: checksums, by the first byte and the number of bytes; others are computed from the file.

    Raises:
        OSError: the file cannot be read or written.
    """
    with zipfile.ZipFile(file) as archive:
        entries, position = archive.infolist(), archive.start_dir
    for entry in entries:
        start = entry.header_offset + 30 + sum(struct.unpack("<2H", _read(file, entry.header_offset + 26, 4)))
        checksum = known.get((start, entry.file_size))
        packed = struct.pack("<I", _computed(file, start, entry.file_size) if checksum is None else checksum)
        if _read(file, start + entry.file_size, 4) == _BEHIND_DATA:
            _write(file, start + entry.file_size + 4, packed)
        _write(file, position + 16, packed)
        position += 46 + sum(struct.unpack("<3H", _read(file, position + 28, 6)))
    file.seek(0, os.SEEK_END)


def _read(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    file.seek(offset)
    return file.read(nbytes)


def _write(file: BinaryIO, offset: int, contents: bytes) -> None:
    file.seek(offset)
    file.write(contents)


def _computed(file: BinaryIO, start: int, nbytes: int) -> int:
    checksum = 0
    for offset in range(0, nbytes, _STEP_BYTES):
        checksum = zlib.crc32(_read(file, start + offset, min(_STEP_BYTES, nbytes - offset)), checksum)
    return checksum
