"""``python -m lightning_cxl``: the main job's commands, ``env``, ``calibrate``, ``plan`` and ``bench``."""

import argparse
import sys

from lightning_cxl.errors import LightningCXLError


def main() -> None:
    """Run `sys.argv`; an error of ours, or a missing package, ends as one message on stderr and exit status 1."""
    try:
        if sys.argv[1:2] == ["env"]:
            _env(sys.argv[2:])
        elif sys.argv[1:2] == ["calibrate"]:
            from lightning_cxl.commands.calibrate.command import main as calibrate

            calibrate(sys.argv[2:])
        elif sys.argv[1:2] == ["plan"]:
            from lightning_cxl.commands.plan.command import run as plan

            plan()
        elif sys.argv[1:2] == ["bench"]:
            from lightning_cxl.commands.bench.adam import main as bench

            bench(sys.argv[2:])
        else:
            from lightning_cxl.finetune.cli import (
                main as finetune,  # imports torch and transformers: not for `env --help`
            )

            finetune()
    except LightningCXLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        # Lightning raises it without a name where jsonargparse is missing, and says what to install
        missing = f"package `{error.name}`, which is not installed: pip install {error.name}" if error.name else error
        sys.exit(f"`python -m lightning_cxl {' '.join(sys.argv[1:2])}` needs {missing}")


def _env(arguments: list[str]) -> None:
    """Print what this machine has, and what to change."""
    parser = argparse.ArgumentParser("python -m lightning_cxl env", description=_env.__doc__)
    parser.parse_args(arguments)
    from lightning_cxl.commands.env import environment_report, format_environment

    print(format_environment(environment_report()))


if __name__ == "__main__":
    main()
