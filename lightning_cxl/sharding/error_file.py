"""`record`: writes an error into the file that ``torchrun`` reads for its summary."""

from threading import Event, Thread

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def record(error: Exception) -> None:
    """Write an error where torchrun asks for it; nothing where it does not.

    In a thread of its own, since handlers of signals run in the main thread alone: torchrun sends SIGTERM to the ranks
    that are left, Lightning's handler of it may raise, and torchrun does not restart after a file that is half written.
    Python waits for the thread before it ends.
    """
    is_written = Event()
    Thread(target=_record, args=(error, is_written), name="error-file").start()
    is_written.wait()  # a `join` that a signal breaks takes the thread for ended: Python would not wait for it


def _record(error: Exception, is_written: Event) -> None:
    trace = error.__traceback__
    try:
        raise error  # torch takes the traceback of what is handled just now
    except Exception as handled:
        get_error_handler().record_exception(handled)
    finally:
        error.__traceback__ = trace
        is_written.set()
