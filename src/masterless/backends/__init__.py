"""Who performs steps: each backend is a folder (or a file) that registers itself with `masterless.step.dispatch`."""

from masterless.backends import reference as reference
from masterless.backends.cpu import backend as _cpu  # noqa: F401
from masterless.backends.triton import backend as _triton  # noqa: F401
