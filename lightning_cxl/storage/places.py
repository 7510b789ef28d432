"""The places of one store: its locked folders, the drives in them, and their files."""

import contextlib
import secrets
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.storage.drive import Drive
from lightning_cxl.storage.folder import MANIFEST, Folder, is_block_device
from lightning_cxl.storage.manifest import Manifest, decode
from lightning_cxl.storage.system import System

WHAT_TO_DO = "Use another folder, or delete this one if nobody needs it."


class Places:
    """Locks folders, cleans them, and opens one drive for each path.

    Args:
        paths: a folder for each drive; others than the first may be block devices.
        keeps: whether a generation that lies there is kept.
        system: makes the system calls.

    Raises:
        ConfigError, StorageError, CheckpointError: as of `Store`.
    """

    def __init__(self, paths: Sequence[Path], *, keeps: bool, system: System) -> None:
        self._system = system
        self.paths = tuple(str(path) for path in paths)
        self.files_stay = False
        self.drives: list[Drive] = []
        self._files: list[tuple[Folder, Path]] = []
        with contextlib.ExitStack() as stack:
            folders = self._lock(stack, paths)
            self.home = next(folder for folder in folders if folder is not None)
            self.found = self._read_manifest(keeps)
            self.files_stay = self.found is not None
            self.store_id = self.found.store_id if self.found else secrets.token_hex(8)
            stack.callback(self._remove_files)
            for index, (path, folder) in enumerate(zip(paths, folders, strict=True)):
                self._open_drive(stack, index, path, folder)
            self._opened = stack.pop_all()

    def _lock(self, stack: contextlib.ExitStack, paths: Sequence[Path]) -> list[Folder | None]:
        if not paths:
            raise ConfigError("storage needs at least one path: a folder on a drive")
        if len({Path(path).resolve() for path in paths}) < len(paths):
            raise ConfigError(f"each path is used once, got {', '.join(f'`{path}`' for path in paths)}")
        folders: list[Folder | None] = []
        for index, path in enumerate(paths):
            if is_block_device(path, self._system):
                if index == 0:
                    raise ConfigError(
                        f"`{path}` is a block device, which holds data only: the first path must be a folder, for the "
                        f"lock and the manifest"
                    )
                folders.append(None)
            else:
                folder = Folder(path, self._system)
                stack.callback(folder.close)
                folders.append(folder)
        return folders

    def _read_manifest(self, keeps: bool) -> Manifest | None:
        contents = self.home.read(MANIFEST)
        if contents is None:
            return None
        found = decode(contents, self.home.path / MANIFEST)
        if not keeps:
            raise ConfigError(f"`{self.home.path}` holds {found.said()}, and this run keeps none. {WHAT_TO_DO}")
        if len(found.drives) != len(self.paths):
            raise ConfigError(
                f"`{self.home.path}` holds {found.said()} on {len(found.drives)} drives ({', '.join(found.drives)}), "
                f"and this run has {len(self.paths)}. {WHAT_TO_DO}"
            )
        return found

    def _open_drive(self, stack: contextlib.ExitStack, index: int, path: Path, folder: Folder | None) -> None:
        make = folder is not None and self.found is None
        if folder is not None:
            folder.remove_orphans(self.store_id)
            path = folder.data_path(self.store_id, index)
            self._files.append((folder, path))
        drive = Drive(path, self._system, make=make)
        stack.callback(drive.close)
        drive.prepare()
        self.drives.append(drive)
        if folder is not None and make:
            folder.sync()

    def _remove_files(self) -> None:
        if not self.files_stay:
            for folder, path in self._files:
                folder.remove(path)

    def close(self) -> None:
        """Close all files, remove those that do not stay, and let go of the locks. Idempotent."""
        self._opened.close()
