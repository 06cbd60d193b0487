"""The gap against the bytes of a parameter, with error bars, one panel a setting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .analysis import Summary

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "recipes.png"
SHOWN_UP_TO = 4.0  # bytes; what has exact states lies far to the right and answers another question


def draw(summaries: Sequence[Summary], path: Path = FIGURE) -> Path:
    """Draws the recipes of few bytes; returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cheap = [s for s in summaries if s.gap is not None and s.bytes_per_parameter <= SHOWN_UP_TO]
    panels = sorted({s.setting for s in cheap}, key=_size)
    figure, axes = plt.subplots(
        1, max(1, len(panels)), figsize=(4.2 * max(1, len(panels)), 3.6), sharey=True, squeeze=False
    )
    for axis, panel in zip(axes[0], panels, strict=False):
        unique = {(s.label, s.bytes_per_parameter): s for s in cheap if s.setting == panel}
        for visible4, colour, name in ((False, "C0", "INT8, FP8 or INT6 forward"), (True, "C1", "INT4 forward")):
            shown = [s for s in unique.values() if s.label.removeprefix("preset ").startswith("int4+") == visible4]
            axis.errorbar(
                [s.bytes_per_parameter for s in shown],
                [s.gap or 0.0 for s in shown],
                yerr=[s.error or 0.0 for s in shown],
                fmt="o",
                markersize=4,
                capsize=2,
                color=colour,
                label=name,
            )
        axis.axhline(0.0, color="0.6", linewidth=0.8)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel("bytes per parameter")
    axes[0][0].set_ylabel("gap to the best fp32 AdamW (%)")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _size(setting: str) -> tuple[int, str]:
    digits = "".join(c for c in setting.split("k@")[0] if c.isdigit())
    return int(digits or 0), setting
