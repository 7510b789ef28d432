"""Lightning's checkpoint plug-in with our way of writing and reading local files."""

from pathlib import Path
from typing import Any

from lightning_cxl.integrations.lightning.lightning_api import TorchCheckpointIO
from lightning_cxl.run.checkpoint_file import load_file, save_file


class CXLCheckpointIO(TorchCheckpointIO):
    """Writes local files directly and atomically, and reads them through a memory map.

    Lightning's own writer builds the whole file in memory first, its reader holds a full copy until training starts:
    both add the size of the model and optimizer to the peak. Remote paths go through Lightning's code unchanged.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write `checkpoint` to `path`. See `lightning_cxl.run.checkpoint_file.save_file`."""
        if not _is_ours(path, storage_options):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            save_file(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at `path`. See `lightning_cxl.run.checkpoint_file.load_file`."""
        if _is_remote(path):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        return load_file(Path(path), map_location, weights_only)


def _is_ours(path: str | Path, storage_options: Any | None) -> bool:
    return storage_options is None and not _is_remote(path)


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)
