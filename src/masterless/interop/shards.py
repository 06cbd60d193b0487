"""Dense checkpoints into quantized models, tensor by tensor: the peak is the quantized model and one tensor.

Contract:
    * A checkpoint is a safetensors file, an index of several (``model.safetensors.index.json``), or a directory that
      holds either: what Hugging Face publishes. Sources may be bf16, fp16 or fp32.
    * Names and shapes are checked against the headers before anything is changed.
    * Each tensor is converted to the parameter's dtype and rounded to nearest, as ``quantize_`` of the loaded dense
      model would do, to the bit. Of two tied names one is enough.
    * A file is mapped for one tensor at a time: what stays mapped counts as resident memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from masterless.interop.files import FileError, StrPath, open_regular, read_json, reason_of
from masterless.interop.safetensors import library, match_names
from masterless.tensor.build import encode_converted_
from masterless.tensor.quantized import QuantizedTensor

INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Progress:
    """How far loading is.

    Attributes:
        name: the tensor that was loaded last.
        done: bytes of the checkpoint that have been loaded.
        total: all of them.
    """

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class _Source:
    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int

    def read(self) -> Tensor:
        with _open(self.file) as file:
            return file.get_tensor(self.name)


def load_dense(
    model: nn.Module, path: StrPath, on_tensor: Callable[[Progress], None] | None = None, *, prefix: str = ""
) -> list[str]:
    """Loads a dense safetensors checkpoint into a model that may be quantized, one tensor at a time.

    Build the model with ``build_quantized(make, ..., initialise=False)``, and it is never dense.

    Args:
        model: a module with the names and shapes of the checkpoint.
        path: a file, an index, or a directory.
        on_tensor: called after every tensor, for a progress bar.
        prefix: of the model's names that the checkpoint's lack, e.g. ``"model."``.

    Returns:
        The names of the parameters that were rounded to a quantized format.

    Raises:
        ValueError: if names or shapes do not match or a file is damaged; the model is then unchanged. A tensor with NaN
            is found on the way: earlier ones have been loaded then.
    """
    sources = {prefix + name: source for name, source in _sources(Path(path)).items()}
    targets = dict(model.state_dict(keep_vars=True))
    matched = match_names(targets, sources, path)
    for name, key in matched.items():
        target, source = targets[name], sources[key]
        if tuple(target.shape) != source.shape:
            raise ValueError(
                f"{name!r} has shape {source.shape} in {source.file} and {tuple(target.shape)} in the model; build the "
                f"model with the checkpoint's configuration"
            )
        if target.is_floating_point() and source.dtype not in _FLOATS:
            raise ValueError(
                f"{name!r} is {source.dtype} in {source.file}: dense checkpoints are bf16, fp16 or fp32; quantized "
                f"ones load with load_safetensors"
            )
    total, done, rounded = sum(sources[key].size for key in matched.values()), 0, []
    with torch.no_grad():
        for name, key in matched.items():
            target, source = targets[name], sources[key]
            value = source.read()
            try:
                if isinstance(target, QuantizedTensor):
                    encode_converted_(target, value)
                    rounded.append(name)
                else:
                    target.copy_(value)
            except ValueError as error:
                raise ValueError(f"{name!r} of {source.file}: {error}") from error
            done += source.size
            if on_tensor is not None:
                on_tensor(Progress(name, done, total))
    return rounded


def _open(path: Path) -> Any:
    st = library("safetensors")
    try:
        return st.safe_open(path, framework="pt", device="cpu")
    except (st.SafetensorError, OSError) as error:
        raise FileError(f"{path}: no safetensors file, or damaged ({reason_of(error)}); load it anew") from error


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if (path / INDEX).exists():
            return _files(path / INDEX)
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise FileError(
                f"{path}: holds {len(found)} safetensors files and no {INDEX}; pass the file, or add the index"
            )
        return found
    if path.suffix != ".json":
        return [path]
    index = read_json(path)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise FileError(f"{path}: is no index of safetensors files (no weight_map); pass {INDEX}")
    shards = sorted(set(names.values()))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise FileError(f"{path}: names {outside[0]!r}, which is not beside it; an index lists files of its own folder")
    return [path.parent / name for name in shards]


def _sources(path: Path) -> dict[str, _Source]:
    """Every tensor of a checkpoint, from the headers of its files."""
    sources: dict[str, _Source] = {}
    for file in _files(path):
        open_regular(file).close()  # the library would wait for a pipe
        with _open(file) as opened:
            for name in opened.keys():
                if name in sources:
                    raise FileError(f"{file}: holds {name!r}, as does {sources[name].file}; which is meant?")
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                size = {"F32": 4, "BF16": 2, "F16": 2}.get(dtype, 1) * int(torch.Size(shape).numel())
                sources[name] = _Source(file, name, shape, dtype, size)
    return sources
