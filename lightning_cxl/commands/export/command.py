"""``python -m lightning_cxl export CKPT FOLDER``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_cxl.commands.export.export import Exported, export_checkpoint
from lightning_cxl.units import format_bytes

_DESCRIPTION = """\
Writes a checkpoint as a folder that transformers, and tools that read its folders (llama.cpp), load: config, tokenizer,
and weights as safetensors. The checkpoint is a file of Lightning or Fabric, or a folder: of Lightning with several
processes, of Accelerate (save_state), of the Hugging Face Trainer or of peft. Adapters are merged into the base model;
quantised weights become plain numbers."""
_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str]) -> None:
    """Export what the arguments name, and say what was written."""
    parser = argparse.ArgumentParser(
        "python -m lightning_cxl export",
        description=_DESCRIPTION,
        epilog="example: python -m lightning_cxl export last.ckpt folder --dtype bfloat16",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a file or folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="is created")
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="the model that was trained, for what the checkpoint does not hold"
    )
    parser.add_argument(
        "--adapter-config", type=Path, metavar="FILE", help="peft's adapter_config.json, for adapters in a state dict"
    )
    parser.add_argument("--only-adapter", action="store_true", help="write the adapter alone, for peft")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="of the weights; float32 and float16 are made from "
        "float32 master weights where CKPT has them; default: the weights that the model computes with",
    )
    parser.add_argument("--max-shard-bytes", default="5GiB", metavar="BYTES", help="of one file (default: 5GiB)")
    args = parser.parse_args(arguments)
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
