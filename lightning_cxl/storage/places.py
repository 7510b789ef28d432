"""The places of one store: its locked folders, the drives in them, and their files."""

import contextlib
import json
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError
from lightning_cxl.storage.drive import Drive
from lightning_cxl.storage.folder import MANIFEST, PART, Folder
from lightning_cxl.storage.manifest import Manifest, decode
from lightning_cxl.storage.system import System

log = logging.getLogger(__name__)

_USE_ANOTHER = "Use another folder."
WHAT_TO_DO = (
    f"{_USE_ANOTHER} A checkpoint with checkpoint='reference' needs what lies here: before you delete it, save it "
    "whole with `torch.save(lightning_cxl.plain_checkpoint(torch.load(CHECKPOINT)), NEW_FILE)`."
)


class Places:
    """Locks folders, cleans them, and opens one drive for each path.

    Args:
        paths: a folder for each drive.
        keeps: whether a generation that lies there is kept.
        system: makes the system calls.

    Raises:
        ConfigError, StorageError, CheckpointError: as of `Store`.
    """

    def __init__(self, paths: Sequence[Path], *, keeps: bool, system: System) -> None:
        self._system = system
        self._keeps = keeps
        self.paths = tuple(str(path) for path in paths)
        self.files_stay = False
        self.drives: list[Drive] = []
        self._files: dict[int, tuple[Folder, Path]] = {}  # by the number of their drive
        with contextlib.ExitStack() as stack:
            folders = self._lock(stack, paths)
            self.home = folders[0]
            self.found = self._read_manifest(keeps)
            self.files_stay = self.found is not None
            self.store_id = self.found.store_id if self.found else secrets.token_hex(8)
            stack.push(self._leave)
            for index, folder in enumerate(folders):
                self._open_drive(stack, index, folder)
            self._opened = stack.pop_all()

    def _lock(self, stack: contextlib.ExitStack, paths: Sequence[Path]) -> list[Folder]:
        if not paths:
            raise ConfigError("storage needs at least one path: a folder on a drive")
        if len({Path(path).resolve() for path in paths}) < len(paths):
            raise ConfigError(f"each path is used once, got {', '.join(f'`{path}`' for path in paths)}")
        folders: list[Folder] = []
        for path in paths:
            folders.append(Folder(path, self._system))
            stack.callback(folders[-1].close)
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

    def _check_other(self, folder: Folder) -> None:
        """Refuse a folder with data of another store that keeps a generation.

        Raises:
            ConfigError: it has.
        """
        if folder.read(MANIFEST) is not None:
            raise ConfigError(f"`{folder.path}` holds a generation of its own, of another run. {WHAT_TO_DO}")
        contents = folder.read(PART)
        if contents is not None:
            self._check_not_needed(folder.path, contents)

    def _check_not_needed(self, path: Path, part: bytes) -> None:
        """Refuse a path that `part` says belongs to another store, if that store has a generation.

        Raises:
            ConfigError: it has, or nobody knows.
        """
        try:
            fields = json.loads(part)
            home = Path(fields["home"]) / MANIFEST
            needed = decode(home.read_bytes(), home).store_id == fields["store"]
        except FileNotFoundError:  # the disk of the folder may not be mounted, or someone has lost the manifest
            needed = not home.parent.is_dir() or (home.parent / PART).exists()
        except (ValueError, KeyError, TypeError, OSError, CheckpointError) as error:
            raise ConfigError(
                f"`{path}` holds a part of another run, and it cannot be checked whether that is needed: {error}. "
                f"{_USE_ANOTHER}"
            ) from None
        if needed:
            missing = ", which is missing: mount its drive, or put it back from a backup"
            raise ConfigError(
                f"`{path}` holds a part of a generation whose manifest is `{home}`"
                f"{'' if home.exists() else missing}. {WHAT_TO_DO if home.exists() else _USE_ANOTHER}"
            )

    def _open_drive(self, stack: contextlib.ExitStack, index: int, folder: Folder) -> None:
        new = self.found is None
        if new:
            self._check_other(folder)
        path = folder.data_path(self.store_id, index)
        self._files[index] = (folder, path)
        drive = Drive(path, self._system, make=new)
        stack.callback(drive.close)
        drive.prepare()
        self.drives.append(drive)
        if not self._keeps:  # so that nothing is left of a run that is killed; `close` removes what cannot go now
            with contextlib.suppress(StorageError):
                folder.remove(path)
        folder.remove_orphans(self.store_id)
        folder.sync()

    def _part(self, drive: int) -> bytes:
        return json.dumps({"store": self.store_id, "drive": drive, "home": str(self.home.path.resolve())}).encode()

    def keep_files(self) -> None:
        """Say that files stay at `close`, and note in other folders whose they are.

        Raises:
            StorageError: that cannot be noted.
        """
        if self.files_stay:
            return
        for index, (folder, _) in self._files.items():
            if index > 0:
                folder.write_new(PART, self._part(index))
                folder.publish(PART)
        self.files_stay = True

    def mark_home(self) -> None:
        """Note, once the manifest is there, that there is one: if it gets lost, the data must not be deleted.

        Raises:
            StorageError: that cannot be noted.
        """
        if self.home.read(PART) is None:
            self.home.write_new(PART, self._part(0))
            self.home.publish(PART)

    def _leave(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self._remove_files()
        except StorageError as another:
            if error is None:
                raise
            # users need the first error; the next store here removes the files
            log.warning(f"the error that ended the storage was not the only one: {another}")

    def _remove_files(self) -> None:
        if not self.files_stay:
            for folder, path in self._files.values():
                folder.remove(path)
                folder.remove(folder.path / PART)

    def close(self) -> None:
        """Close all files, remove those that do not stay, and let go of the locks. Idempotent."""
        self._opened.close()
