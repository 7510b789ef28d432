"""`WatchingLauncher`: starts processes as Lightning does, and lets a failure of one be known to all."""

from collections.abc import Callable
from typing import Any

from lightning_cxl.integrations.lightning.lightning_api import ClusterEnvironment, SubprocessScriptLauncher
from lightning_cxl.sharding.error_file import record
from lightning_cxl.sharding.watch import Watch, open_watch


class WatchingLauncher(SubprocessScriptLauncher):
    """Starts the other processes of this machine, unless a cluster has; then it only checks their number.

    An error is told to all ranks before Lightning handles it, whose callbacks may wait for other ranks there. It also
    goes into the file that ``torchrun`` reads for its summary. See [Note: Failures of ranks].
    """

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._watch: Watch | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start what is to be started, then call `function` in every process."""
        return super().launch(self._call, function, *args, trainer=trainer, **kwargs)

    def watch(self) -> None:
        """Watch all ranks until `function` returns; the process group is up."""
        self.end_watch()
        self._watch = open_watch(self.cluster_environment.main_address)

    def end_watch(self) -> None:
        """This rank has done its work, or has handled its failure. Idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            try:
                if self._watch is not None:
                    self._watch.tell(error)
            finally:  # a signal may have come meanwhile, whose handler raises
                if isinstance(error, Exception):
                    record(error)
            raise
        self.end_watch()
        return result
