"""``python -m lightning_cxl export CKPT FOLDER``."""

from collections.abc import Sequence

import torch

from lightning_cxl.commands import parsers
from lightning_cxl.commands.export.export import Exported, export_checkpoint
from lightning_cxl.units import format_bytes


def main(arguments: Sequence[str]) -> None:
    """Export what the arguments name, and say what was written."""
    args = parsers.export().parse_args(arguments)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    exported = export_checkpoint(
        args.checkpoint,
        args.folder,
        base=args.base,
        adapter_config=args.adapter_config,
        only_adapter=args.only_adapter,
        dtype=dtype,
        max_shard_bytes=args.max_shard_bytes,
    )
    print(_described(exported, dtype))


def _described(exported: Exported, dtype: torch.dtype | None) -> str:
    size = format_bytes(sum(path.stat().st_size for path in exported.files))
    count = f"{len(exported.files)} file" + ("s" if len(exported.files) > 1 else "")
    lines = [f"exported {exported.num_tensors} tensors, {size} in {count}, to {exported.folder}"]
    if exported.num_merged:
        lines.append(f"merged an adapter into {exported.num_merged} layers")
    if exported.num_dequantised:
        lines.append(
            f"dequantised {exported.num_dequantised} weights of bitsandbytes: they have the numbers that training "
            "computed with, in plain form"
        )
    if exported.num_masters:
        lines.append(f"{exported.num_masters} weights are the float32 master weights of the optimizer")
    elif dtype is torch.float32:
        lines.append("the checkpoint has no float32 master weights beside its weights")
    if exported.left_out:
        lines.append(f"left out {exported.left_out} tensors of other modules")
    if not (exported.folder / "tokenizer_config.json").is_file():
        lines.append("no tokenizer was found: give a folder that has one with --base, or save one there")
    return "\n".join(lines)
