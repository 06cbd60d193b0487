"""Ways to damage a file, and to forge one whose checksums are right: functions of the bytes and a seeded source."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Iterator
from typing import Any

TOKENS = [b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b'""', b"[]", b"{}", b"9" * 5000, b"[" * 5000, b"{" * 99]
TOKENS += [b"\0" * 9, b"\xff" * 9, b"4611686018427387904", b"18446744073709551616", b"../../../etc/passwd", b'"', b"\n"]
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    {"a": 1},
]


# --- damage ---------------------------------------------------------------------------------------------------------


def damage(raw: bytes, source: random.Random) -> bytes:
    """Bytes with some of them changed, cut, repeated or replaced."""
    content = bytearray(raw)
    for _ in range(source.choice([1, 1, 1, 2, 8])):
        at = source.randrange(len(content) + 1)
        to = min(len(content), at + source.choice([1, 4, 64, 4096]))
        kind = source.randrange(7)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << source.randrange(8)
        elif kind == 1:
            content[at:to] = source.randbytes(to - at)
        elif kind == 2:
            del content[at:to]
        elif kind == 3:
            del content[at:]
        elif kind == 4:
            content[at:at] = content[at:to]
        else:
            content[at : at if kind == 5 else to] = source.choice(TOKENS)
    return bytes(content)


def forge_json(raw: bytes, source: random.Random) -> bytes:
    """A JSON document, or lines of it, with some value replaced or dropped, or a whole document of another kind."""
    if source.random() < 0.05:
        return source.choice(
            [b"[[]," * 200_000 + b"0", b'{"a":' * 100_000, b"[" + b"[]," * 300_000 + b"[]]", b"9" * 9999]
        )
    lines = raw.split(b"\n")
    at = source.randrange(len(lines)) if len(lines) > 5 and raw[:1] == b"{" and b"}\n{" in raw else None
    document = json.loads(raw if at is None else lines[at] or b"{}")
    places = list(_places(document))
    for _ in range(source.choice([1, 1, 2, 5])):
        if not places:
            break
        inside, key = source.choice(places)
        if source.random() < 0.2 and isinstance(inside, dict):
            inside.pop(key, None)
        elif source.random() < 0.2 and isinstance(inside, dict):
            inside[str(source.choice(SCALARS))] = inside.pop(key, 0)
        else:
            value = source.choice(SCALARS)
            if isinstance(inside, dict) or key < len(inside):
                inside[key] = value
    made = json.dumps(document).encode()
    if at is None:
        return made
    return b"\n".join([*lines[:at], made, *lines[at + 1 :]])


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items) if isinstance(document, (dict, list)) else []:
        yield document, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def forge_header(raw: bytes, source: random.Random) -> bytes:
    """A safetensors file with a forged header of the right length."""
    length = int.from_bytes(raw[:8], "little")
    header = forge_json(raw[8 : 8 + length], source) if source.random() < 0.8 else damage(raw[8 : 8 + length], source)
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def forge_description(raw: bytes, source: random.Random) -> bytes:
    """The description of a distributed checkpoint, forged, with its digest put right."""
    about = forge_json(json.dumps(json.loads(raw)["checkpoint"]).encode(), source)
    return b'{"sha256": "' + hashlib.sha256(about).hexdigest().encode() + b'", "checkpoint": ' + about + b"}"


def forge_archive(raw: bytes, source: random.Random) -> bytes:
    """An archive of torch.save with one record changed and all checksums right."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = archive.namelist()
        pickle = next(n for n in names if n.endswith("data.pkl"))
        chosen = pickle if source.random() < 0.7 else source.choice(names)
        how = source.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(target, "w", how) as made:
            for name in names:
                content = archive.read(name)
                if name == chosen:
                    content = _forge_pickle(content, source) if name == pickle else damage(content, source)
                made.writestr(name, content)
    return target.getvalue()


def _forge_pickle(raw: bytes, source: random.Random) -> bytes:
    """A pickle with some small number in it changed, which is where shapes, sizes and offsets are; or just damaged."""
    places = [i for i in range(len(raw) - 2) if raw[i : i + 1] in (b"K", b"M")]
    if source.random() < 0.4 or not places:
        return damage(raw, source)
    content = bytearray(raw)
    for _ in range(source.choice([1, 2, 3])):
        at = source.choice(places)
        content[at + 1] = source.randrange(256)
    return bytes(content)
