"""`read_key`: the user's key for what lies on drives, from a file or an environment variable."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.ssd_options import key_source
from lightning_cxl.storage.cipher import KEY_BYTES

_LEAST_VALUES = 16  # different ones in a key: of 32 random bytes fewer are as good as impossible
_IN_VARIABLE = 'export {name}=$(python3 -c "import secrets; print(secrets.token_hex(64))")'
_IN_FILE = "(umask 077; head -c 64 /dev/urandom > {path})"
_KEEP = "Keep a copy of the key: without it, what was written with it is lost"


def read_key(source: str, folders: Sequence[Path]) -> bytes:
    """Return a key of 32 or 64 bytes. No message shows any of it.

    Args:
        source: ``"$NAME"``: a variable with the bytes as hexadecimal digits; or the path of a file with the bytes as
            they are, which nobody else may read.
        folders: that the key protects.

    Raises:
        ConfigError: there is no key, one of another length or not a random one, others may read it, or it lies in one
            of the folders. The message says how to make one.
    """
    place = key_source(source)
    if isinstance(place, Path):
        what, how = f"the key file `{place}`", _IN_FILE.format(path=place)
        key = _from_file(place, folders, how)
        if key and all(chr(byte) in "0123456789abcdefABCDEF\r\n" for byte in key):
            raise ConfigError(f"{what} holds text: a file has the bytes of the key as they are. Make one with `{how}`")
    else:
        what, how = f"the environment variable {place}", _IN_VARIABLE.format(name=place)
        key = _from_variable(place, how)
    if len(key) not in KEY_BYTES:
        raise ConfigError(f"{what} has a key of {len(key)} bytes, not of 64 or 32. Make one with `{how}`")
    if len(set(key)) < _LEAST_VALUES:
        raise ConfigError(f"{what} has a key that is not random: it has few different bytes. Make one with `{how}`")
    return key


def _from_variable(name: str, how: str) -> bytes:
    text = os.environ.get(name)
    if text is None:
        raise ConfigError(
            f"the environment variable {name} for the key of tier `ssd` is not set. Make one with `{how}`. {_KEEP}"
        )
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(
            f"the environment variable {name} for the key of tier `ssd` is not written in hexadecimal digits (what it "
            f"holds is not shown here). Make one with `{how}`. {_KEEP}"
        ) from None


def _from_file(path: Path, folders: Sequence[Path], how: str) -> bytes:
    real = path.resolve()
    for folder in folders:
        if real.is_relative_to(folder.resolve()):
            raise ConfigError(
                f"the key file `{path}` lies in `{folder}`, which it protects: who takes the drive has both. Move it "
                f"elsewhere"
            )
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"`{path}` for the key of tier `ssd` is no file. Make one with `{how}`. {_KEEP}")
            if mode & 0o077:
                raise ConfigError(
                    f"the key file `{path}` has mode {stat.S_IMODE(mode):04o}: others than its owner may use it. "
                    f"Protect it with `chmod 600 {path}`"
                )
            return file.read(2 * KEY_BYTES[-1])
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file `{path}` of tier `ssd`: {error.strerror}. Make one with `{how}`. {_KEEP}"
        ) from None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # else a pipe would wait for a writer
