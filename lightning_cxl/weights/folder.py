"""Which files hold the weights of a model: one file, a list, or a folder as Hugging Face tools write it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from lightning_cxl.errors import CheckpointError
from lightning_cxl.weights.tensor_file import TensorFile

Source = str | PathLike[str] | Sequence[str | PathLike[str]]
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@contextmanager
def open_weights(source: Source) -> Iterator[list[TensorFile]]:
    """Open every file of a source, with all headers checked.

    Args:
        source: a file, a list of files, or a folder with `model.safetensors` or `model.safetensors.index.json`.

    Raises:
        CheckpointError: a file is missing or damaged, two hold a tensor of the same name, or they do not fit the index.
    """
    paths, index = _files_of(source)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        names = ", ".join(f"`{path}`" for path in missing[:5])
        raise CheckpointError(
            f"{len(missing)} of {len(paths)} files with weights do not exist: {names}"
            f"{', ...' if len(missing) > 5 else ''}. Complete the download, or name the files that there are."
        )
    with ExitStack() as opened:
        files = [opened.enter_context(TensorFile(path)) for path in paths]
        _check_names(files, index)
        yield files


def _files_of(source: Source) -> tuple[list[Path], dict[str, str]]:
    """Return the files, and which of them holds which tensor, where an index says so."""
    if not isinstance(source, (str, PathLike)):
        paths = [Path(fspath(path)) for path in source]
        if not paths:
            raise CheckpointError("an empty list of files holds no weights; name at least one")
        return paths, {}
    path = Path(fspath(source))
    if path.is_dir():
        path = _main_file(path)
    return _files_of_index(path) if path.suffix == ".json" else ([path], {})


def _main_file(folder: Path) -> Path:
    for name in (SINGLE_FILE, INDEX_FILE):  # in the order in which transformers looks
        if (folder / name).is_file():
            return folder / name
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    text = f"it has {', '.join(found[:5])}" if found else "it has no weights of any kind"
    raise CheckpointError(
        f"the folder `{folder}` has neither {SINGLE_FILE} nor {INDEX_FILE}; {text}. Name safetensors files of other "
        "names one by one; convert .bin files with `save_pretrained` of transformers."
    )


def _files_of_index(path: Path) -> tuple[list[Path], dict[str, str]]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        _check_map(weight_map)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"`{path}` is not an index of safetensors files ({type(error).__name__}: {error}). Download it again."
        ) from error
    return [path.parent / name for name in dict.fromkeys(weight_map.values())], weight_map


def _check_map(weight_map: Any) -> None:
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("its weight_map is no table of names, or empty")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or file == "..":
            raise ValueError(f"its weight_map names {file!r}, which is not a file beside it")


def _check_names(files: Iterable[TensorFile], index: dict[str, str]) -> None:
    holder: dict[str, TensorFile] = {}
    for file in files:
        for name in file.entries:
            if name in holder:
                raise CheckpointError(
                    f"tensor {name!r} is in `{holder[name].path}` and in `{file.path}`: they are files of different "
                    "models, or an old one was left behind. Name the right files."
                )
            holder[name] = file
    for name, path in index.items():
        if name not in holder or holder[name].path.name != path:
            where = f"is in `{holder[name].path.name}`" if name in holder else "is in none of its files"
            raise CheckpointError(
                f"the index says that tensor {name!r} is in `{path}`, but it {where}: index and files are not of the "
                "same save. Download or save the model again."
            )
