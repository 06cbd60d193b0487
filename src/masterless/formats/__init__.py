"""How numbers are stored: formats, their geometry, rounding and codecs, and the storage of one tensor."""

from masterless.formats.format import (
    DEFAULT_BLOCK,
    MASTER,
    SCALE_BITS,
    Format,
    FormatError,
    as_first_moment,
    as_second_moment,
    minifloat,
    names,
    parse,
)

__all__ = [
    "DEFAULT_BLOCK",
    "MASTER",
    "SCALE_BITS",
    "Format",
    "FormatError",
    "as_first_moment",
    "as_second_moment",
    "minifloat",
    "names",
    "parse",
]
