"""Processes that are forked from one that has imported packages and done nothing else: an import takes seconds.

Tests of imports, and of the way that Python ends, start a process of their own.
"""

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).resolve().parent.parent
_IMPORTED = ["lightning_cxl", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"]


def context():
    """Return what makes such processes, and their queues."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def start(function, *args):
    """Return a process that runs a function of a module, with the environment that is this process's now."""
    process = context().Process(target=_call, args=(dict(os.environ), function, args), daemon=True)
    process.start()
    return process


def _call(environ, function, args):
    os.environ.clear()
    os.environ.update(environ)
    function(*args)


def in_a_process(function, *args):
    """Return what a function of a module returns in a process of its own."""
    here, there = context().Pipe(duplex=False)
    process = start(_answer, there, function, *args)
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def _answer(pipe, function, *args):
    pipe.send(function(*args))


def run_python(*command, timeout=240, **environ):
    """Run ``python -c code ...`` or ``python -m module ...``, and return its exit code and what it has written."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        names = [f"/proc/{os.getpid()}/fd/{each.fileno()}" for each in (out, err)]
        process = start(_run, [str(each) for each in command], environ, *names)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(command, process.exitcode, *(Path(name).read_text() for name in names))


def _run(command, environ, *outputs):
    os.environ.update(environ)
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY), number)
    kind, program, *arguments = command
    sys.argv = [kind, *arguments]
    if kind == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def copy_tree(target, *, with_compiled=False):
    """Copy what git knows, or would add, as it is in the working tree; perhaps the compiled modules, too."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "lightning_cxl" / "native").glob("*.so")]
    for name in [*names, *(compiled if with_compiled else ())]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def forget_libraries():
    """Forget what libraries remember for a whole process.

    Accelerate: the device of its first use, and tests name it another. Optimizers of bitsandbytes: which parameters, by
    number, keep state in 32 bit.
    """
    if "accelerate.state" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if "bitsandbytes.optim" in sys.modules:
        sys.modules["bitsandbytes.optim"].GlobalOptimManager.get_instance().initialize()
