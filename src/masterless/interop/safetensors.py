"""Models with quantized parameters as safetensors files.

Contract:
    * A quantized parameter is stored as its plain tensors: ``name.codes``, ``name.scale``, ``name.hidden``,
      ``name.master``. Everything else is stored under its own name. Nothing is decoded or rounded on the way.
    * The metadata holds, as JSON under ``masterless``, the format, shape and dtype of every quantized parameter, and
      which names share one tensor (tied weights are stored once).
    * Under ``masterless.sha256`` it holds a digest of that description and of every tensor's name, type, shape and
      bytes, which loading verifies. Files that this library wrote without one load with a warning; other tools' files
      have none.
    * A file is written beside its place and moved there: readers see the old file or the new one, never half of one.
    * Loading checks names, formats and shapes before it changes anything. A dense tensor in the file may be loaded into
      a quantized parameter, which rounds it to nearest; every other mismatch is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from masterless import __version__, formats
from masterless.formats.storage import Storage, tensor_specs
from masterless.interop.files import FileError, open_regular, reason_of, replacing
from masterless.tensor.quantized import QuantizedTensor

LAYOUT = 1
ABOUT, DIGEST = "masterless", "masterless.sha256"  # keys of the metadata
_MOST_NAMES = 5
_DTYPES = {torch.uint8: "U8", torch.int16: "I16", torch.bfloat16: "BF16", torch.float32: "F32"}  # safetensors' names


def save_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a model's parameters and buffers to a safetensors file, quantized ones as they are stored.

    Args:
        model: any module; tied parameters are stored once.
        path: the file; it is replaced in one move when everything has been written.

    Raises:
        ValueError: if the model holds something that a safetensors file cannot, with its name.
    """
    save_file = library("safetensors.torch").save_file
    tensors: dict[str, Tensor] = {}
    quantized: dict[str, dict[str, Any]] = {}
    tied: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for name, value in _entries_of(model):
        if id(value) in first_name:
            tied[name] = first_name[id(value)]
            continue
        first_name[id(value)] = name
        if isinstance(value, QuantizedTensor):
            quantized[name] = {
                "format": str(value.format),
                "shape": list(value.shape),
                "dtype": str(value.dtype).removeprefix("torch."),
            }
            parts = {f"{name}.{part}": tensor for part, tensor in value.stored.tensors.items()}
        else:
            parts = {name: value.detach()}
        for key, tensor in parts.items():
            if key in tensors:
                raise ValueError(f"two tensors of the model would be stored as {key!r}; rename the module {key!r}")
            tensors[key] = tensor
    description = {"layout": LAYOUT, "version": __version__, "quantized": quantized, "tied": tied}
    about, tensors = json.dumps(description), _apart(tensors)
    metadata = {"format": "pt", ABOUT: about, DIGEST: digest_of(about, tensors, tensors.__getitem__)}
    with replacing(path) as part:
        save_file(tensors, part, metadata=metadata)


def load_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Loads a safetensors file into a model, quantized parameters bit for bit.

    Args:
        model: a module with the names, shapes and formats of the file. Quantize it first, as it was when it was saved.
        path: a file of `save_safetensors`, or any safetensors file with dense tensors under the model's names.

    Returns:
        The names of quantized parameters that the file holds dense: they were rounded to nearest.

    Raises:
        ValueError: if names, shapes or formats do not match, or the file is damaged; the model is then unchanged.
    """
    st = library("safetensors")
    open_regular(path).close()  # the library would wait for a pipe
    try:
        opened = st.safe_open(os.fspath(path), framework="pt", device="cpu")
    except (st.SafetensorError, OSError) as error:
        raise FileError(f"{path}: no safetensors file, or damaged ({reason_of(error)}); save it again") from error
    with opened as file:
        entries = _entries_in(file, path)
        _verify(file, path)
        targets = dict(_entries_of(model))
        sources = match_names(targets, entries, path)
        for name, source in sources.items():
            _check(name, targets[name], entries[source], file, path)
        _check_ties(targets, sources, entries, file, path)
        rounded = []
        with torch.no_grad():
            for name, source in sources.items():
                target, entry = targets[name], entries[source]
                if isinstance(target, QuantizedTensor) and entry.format is None:
                    target.encode_(entry.read(file))
                    rounded.append(name)
                else:
                    target.copy_(entry.read(file))
    return rounded


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file: dense (format None), or quantized in several parts."""

    name: str
    shape: tuple[int, ...]
    format: formats.Format | None = None
    dtype: torch.dtype = torch.float32

    def read(self, file: Any) -> Tensor:
        if self.format is None:
            return file.get_tensor(self.name)
        parts = {part: file.get_tensor(f"{self.name}.{part}") for part in tensor_specs(self.format, self.shape)}
        return QuantizedTensor(Storage(self.format, self.shape, parts), self.dtype)


# --- the model ---------------------------------------------------------------------------------------------


def _entries_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, by every name they have."""
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} of the model is a {type(value).__name__}: safetensors files hold only tensors; store it "
                f"beside the file, or use torch.save(model.state_dict(), ...)"
            )
        if hasattr(value, "_local_tensor"):
            raise ValueError(
                f"{name!r} is sharded over several processes; use torch.distributed.checkpoint, or gather it first"
            )
        if value.device.type == "meta":
            raise ValueError(f"{name!r} is on the meta device and has no data; call model.to_empty(device=...) first")
        yield name, value


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, which is what safetensors wants: copies only where they are needed."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        pointer = tensor.untyped_storage().data_ptr()
        part_of_more = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.itemsize
        result[name] = tensor.clone() if pointer in seen or part_of_more else tensor
        seen.add(pointer)
    return result


# --- the file ----------------------------------------------------------------------------------------------


def library(name: str) -> Any:
    """A module of the package safetensors, or an error that says how to get it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError("safetensors files need the package safetensors: pip install safetensors") from error


def digest_of(about: str, names: Iterable[str], read: Callable[[str], Tensor]) -> str:
    """A digest of the description and of the tensors, which are read one after the other."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(names):
        tensor = read(name).contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _verify(file: Any, path: Any) -> None:
    metadata = file.metadata() or {}
    if DIGEST in metadata:
        if digest_of(metadata.get(ABOUT, ""), file.keys(), file.get_tensor) != metadata[DIGEST]:
            raise FileError(f"{path} is damaged: its SHA-256 is not the one it was saved with; restore it from a copy")
    elif ABOUT in metadata:
        message = f"{path} was saved without a checksum, damage to it would go unnoticed; load it and save it again"
        warnings.warn(message, stacklevel=3)


def _entries_in(file: Any, path: Any) -> dict[str, _Entry]:
    """What a file holds, by every name that it has; a tied name leads to the entry that stores it."""
    try:
        return _described(json.loads((file.metadata() or {}).get(ABOUT, "{}")), file, path)
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError, OverflowError) as error:
        raise FileError(
            f"{path} is damaged: its description is not ours ({reason_of(error)}); save it again"
        ) from error


def _described(description: dict[str, Any], file: Any, path: Any) -> dict[str, _Entry]:
    if description.get("layout", LAYOUT) > LAYOUT:
        raise ValueError(
            f"{path} has layout {description['layout']} (written by masterless {description.get('version')}), this "
            f"masterless {__version__} reads up to {LAYOUT}; upgrade masterless"
        )
    keys = set(file.keys())
    entries: dict[str, _Entry] = {}
    for name, about in description.get("quantized", {}).items():
        shape, dtype = tuple(about["shape"]), getattr(torch, about["dtype"])
        if not isinstance(dtype, torch.dtype) or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
            raise TypeError(f"shape {shape} and dtype {about['dtype']!r} of {name!r}")
        entry = _Entry(name, shape, formats.parse(about["format"]), dtype)
        for part, (size, dtype) in tensor_specs(entry.format, entry.shape).items():  # type: ignore[arg-type]
            key, expected = f"{name}.{part}", (tuple(size), _DTYPES[dtype])
            found = (tuple(file.get_slice(key).get_shape()), file.get_slice(key).get_dtype()) if key in keys else None
            if found != expected:
                raise ValueError(
                    f"{path} is damaged: {name!r} in format '{entry.format}' needs a tensor {key!r} of {expected}, "
                    f"found {found or 'none'}; save it again"
                )
            keys.remove(key)
        entries[name] = entry
    entries.update({key: _Entry(key, tuple(file.get_slice(key).get_shape())) for key in keys})
    entries.update({name: entries[source] for name, source in description.get("tied", {}).items()})
    return entries


# --- what fits where ---------------------------------------------------------------------------------------


def listing(names: set[str]) -> str:
    """The first few of some names."""
    shown = ", ".join(sorted(names)[:_MOST_NAMES])
    return shown + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")


def match_names(targets: Mapping[str, Tensor], entries: Mapping[str, Any], path: Any) -> dict[str, str]:
    """Which name of the file each tensor of the model is loaded from. Of tied names one in the file is enough."""
    by_identity: dict[int, list[str]] = {}
    for name, target in targets.items():
        by_identity.setdefault(id(target), []).append(name)
    missing = {name for names in by_identity.values() if not set(names) & set(entries) for name in names}
    unexpected = set(entries) - set(targets)
    if missing or unexpected:
        lines = [f"{path} does not fit the model."]
        if missing:
            lines.append(f"Not in the file: {listing(missing)}.")
        if unexpected:
            lines.append(f"Not in the model: {listing(unexpected)}.")
        lines.append("Build the model as it was when the file was saved, or rename the tensors")
        raise ValueError(" ".join(lines))
    return {names[0]: next(n for n in names if n in entries) for names in by_identity.values()}


def _check(name: str, target: Tensor, entry: _Entry, file: Any, path: Any) -> None:
    if tuple(target.shape) != entry.shape:
        raise ValueError(
            f"{name!r} has shape {entry.shape} in {path} and {tuple(target.shape)} in the model; build the model with "
            f"the file's configuration"
        )
    own = target.format if isinstance(target, QuantizedTensor) else None
    if entry.format is None:
        if own is not None and not bool(torch.isfinite(file.get_tensor(entry.name)).all()):
            raise ValueError(f"{name!r} holds NaN or infinity in {path}, which format '{own}' cannot; repair the file")
    elif own is None:
        raise ValueError(
            f"{name!r} is stored as '{entry.format}' in {path} and dense in the model; call "
            f"quantize_(model, rules={{{name!r}: '{entry.format}'}}) before loading (and dequantize_ afterwards)"
        )
    elif own != entry.format:
        raise ValueError(
            f"{name!r} is stored as '{entry.format}' in {path} and as '{own}' in the model: rounding a second time "
            f"would lose more; quantize the model with '{entry.format}'"
        )


def _check_ties(
    targets: dict[str, Tensor], sources: dict[str, str], entries: dict[str, _Entry], file: Any, path: Any
) -> None:
    """A model that ties two names cannot hold a file that stores different values under them."""
    first = {id(targets[name]): entries[source] for name, source in sources.items()}
    for name, target in targets.items():
        entry = first[id(target)]
        other = entries.get(name, entry)
        if other.name != entry.name and not _same_values(entry, other, file):
            raise ValueError(
                f"{entry.name!r} and {other.name!r} are one parameter in the model and differ in {path}; untie them in "
                f"the model, or make them equal in the file"
            )


def _same_values(a: _Entry, b: _Entry, file: Any) -> bool:
    if (a.shape, a.format) != (b.shape, b.format):
        return False
    parts = [""] if a.format is None else [f".{part}" for part in tensor_specs(a.format, a.shape)]
    return all(torch.equal(file.get_tensor(a.name + part), file.get_tensor(b.name + part)) for part in parts)
