"""``python -m lightning_cxl``: the main job's commands, and ``env``."""

import argparse
import sys

from lightning_cxl.errors import LightningCXLError


def main() -> None:
    """Run `sys.argv`; an error of ours ends as one message on stderr and exit status 1."""
    try:
        if sys.argv[1:2] == ["env"]:
            _env(sys.argv[2:])
        else:
            from lightning_cxl.cli import main as finetune  # imports torch and transformers: not for `env --help`

            finetune()
    except LightningCXLError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _env(arguments: list[str]) -> None:
    """Print what this machine has, and what to change."""
    parser = argparse.ArgumentParser("python -m lightning_cxl env", description=_env.__doc__)
    parser.parse_args(arguments)
    from lightning_cxl.planner.environment import environment_report, format_environment

    print(format_environment(environment_report()))


if __name__ == "__main__":
    main()
