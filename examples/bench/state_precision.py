"""What low-precision optimizer state costs in quality: loss curves of the demo with fp32, bf16 and 8-bit state.

The job of `examples/configs/finetune_stdlib.yaml` for 300 steps, once per precision with the same seed, and once more
in fp32 with another seed: differences between precisions mean something only beside the difference that a seed makes.

    python examples/bench/state_precision.py [--steps 300] [--config FILE.yaml] [--json FILE] [--plot FILE.png]
"""

import argparse
import csv
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "configs" / "finetune_stdlib.yaml"
RUNS = {"fp32": ("fp32", 42), "bf16": ("bf16", 42), "8bit": ("8bit", 42), "fp32, other seed": ("fp32", 43)}
BASELINE = "fp32"


def run(state: str, seed: int, steps: int, config: Path, folder: Path) -> dict[str, dict[int, float]]:
    """Train once and return the curves by name: ``{"train_loss": {step: loss}, "val_loss": ...}``."""
    command = [
        sys.executable, "-P", "-m", "lightning_cxl", "fit", "--config", str(config),
        "--seed_everything", str(seed), "--trainer.max_steps", str(steps),
        "--trainer.val_check_interval", str(max(1, steps // 6)),
        "--trainer.strategy", "lightning_cxl.CXLOffloadStrategy", f"--trainer.strategy.state={state}",
        "--trainer.logger", "lightning.pytorch.loggers.CSVLogger", f"--trainer.logger.save_dir={folder}",
        "--trainer.logger.flush_logs_every_n_steps=1", "--trainer.callbacks=[]",
        "--trainer.enable_checkpointing=false", "--trainer.enable_progress_bar=false",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (metrics,) = folder.rglob("metrics.csv")
    curves: dict[str, dict[int, float]] = {"train_loss": {}, "val_loss": {}}
    with open(metrics) as file:
        for row in csv.DictReader(file):
            for name, curve in curves.items():
                if row.get(name):
                    curve[int(row["step"])] = float(row[name])
    return curves


def smoothed(curve: dict[int, float], step: int, window: int = 20) -> float:
    """Return the mean loss of the steps up to `step`."""
    return statistics.mean(loss for at, loss in curve.items() if step - window < at <= step)


def print_table(curves: dict[str, dict[str, dict[int, float]]]) -> None:
    base = curves[BASELINE]
    print(f"\n{'':>10}  " + "  ".join(f"{name:>24}" for name in curves))
    for title, metric in (("training loss, mean of 20 steps", "train_loss"), ("validation loss", "val_loss")):
        print(f"{title} (difference to {BASELINE})")
        steps = sorted(base["val_loss"])
        for step in steps:
            cells = []
            for curve in curves.values():
                value, reference = (
                    (smoothed(c[metric], step) if metric == "train_loss" else c[metric][step]) for c in (curve, base)
                )
                cells.append(f"{value:>12.4f} ({value - reference:+.4f})")
            print(f"{step + 1:>10}  " + "  ".join(f"{cell:>24}" for cell in cells))


def plot(curves: dict[str, dict[str, dict[int, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, curve in curves.items():
        steps = sorted(curve["train_loss"])[19:]
        axes.plot(steps, [smoothed(curve["train_loss"], step) for step in steps], label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="training loss, mean of 20 steps", title="AdamW with state of different precision")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--config", type=Path, default=CONFIG, help="another job of `python -m lightning_cxl fit`")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    names = list(dict.fromkeys([BASELINE, *options.only]))
    curves = {}
    for name in names:
        print(f"{name}: {options.steps} steps ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = run(*RUNS[name], options.steps, options.config, Path(folder))
    print_table(curves)
    if options.json:
        rows = [
            {"name": f"{name}, {metric}, step {step + 1}", "value": value, "unit": "nats", "goal": None, "holds": None}
            for name, curve in curves.items()
            for metric, points in curve.items()
            for step, value in points.items()
        ]  # fmt: skip
        machine = {"processor": platform.processor() or platform.machine(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
