"""What the processor is: its name, and its generation, which names of cloud machines often leave out.

Two generations may have one name ("AMD EPYC") and differ by half in speed, so that tables need both.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

# vendor, family: the first model of each generation
_GENERATIONS = {
    ("AuthenticAMD", 23): {0x00: "Zen", 0x30: "Zen 2"},
    ("AuthenticAMD", 25): {
        0x00: "Zen 3",
        0x10: "Zen 4",
        0x20: "Zen 3",
        0x60: "Zen 4",
        0x80: "",
        0xA0: "Zen 4",
        0xB0: "",
    },
    ("AuthenticAMD", 26): {0x00: "Zen 5", 0x50: ""},
    ("GenuineIntel", 6): {
        0x00: "",
        0x55: "Skylake or Cascade Lake",
        0x56: "",
        0x6A: "Ice Lake",
        0x6B: "",
        0x6C: "Ice Lake",
        0x6D: "",
        0x8F: "Sapphire Rapids",
        0x90: "",
        0xAD: "Granite Rapids",
        0xAF: "",
        0xCF: "Emerald Rapids",
        0xD0: "",
    },
}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and generation: "AMD EPYC, Zen 5"."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(_fields(lines))
    name = fields.get("model name")
    if not name:
        return platform.machine()
    try:
        vendor, family, model = fields["vendor_id"], int(fields["cpu family"]), int(fields["model"])
    except (KeyError, ValueError):
        return name
    found = generation(vendor, family, model) or f"family {family}, model {model}"
    return f"{name}, {found}"


def generation(vendor: str, family: int, model: int) -> str:
    """What a processor of these numbers is called, or nothing."""
    firsts = _GENERATIONS.get((vendor, family), {})
    at = [first for first in firsts if first <= model]
    return firsts[max(at)] if at else ""


def _fields(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Those of the first processor in the list."""
    for line in lines:
        if not line.strip():
            return
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()
