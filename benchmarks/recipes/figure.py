"""The presets' gap to fp32 against the bytes of a parameter, with error bars, one panel a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from masterless.optim.presets import PRESETS

from .analysis import of_preset, summarise
from .groups import INT4_QAT_SHORT
from .plan import Cell
from .store import Row

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "recipes.svg"
PANELS = ("37k@20", "150k@20", "600k@20", "37k@100")
QAT_LABEL = INT4_QAT_SHORT.label
SHOWN_UP_TO = 4.0  # bytes; the rest lies far to the right


def draw(cells: Sequence[Cell], rows: Mapping[str, Row], path: Path = FIGURE) -> Path:
    """Draws what is measured; returns the file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "masterless"  # the same file from the same rows
    found = summarise(cells, rows)
    presets = [p for p in PRESETS.values() if p.weights is not None and p.bytes_per_parameter <= SHOWN_UP_TO]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(3.1 * len(PANELS), 3.4), sharey=True, sharex=True)
    for axis, panel in zip(axes, PANELS, strict=True):
        qat = [s for s in found if (s.setting, s.label) == (panel, QAT_LABEL) and s.gap is not None]
        for summary in qat[:1]:
            axis.axhline(summary.gap, color="C1", linewidth=0.8, linestyle="--", label="INT4 with master weights")
        for preset in presets:
            own = of_preset(cells, found, preset, panel)
            if own is None:
                continue
            colour = "C1" if preset.name.endswith("int4") else "C0"
            at = preset.bytes_per_parameter, own.gap or 0.0
            axis.errorbar(*at, yerr=own.error or 0.0, fmt="o", markersize=4, capsize=2, color=colour)
            above = preset.name in ("1-byte", "1-byte-int4", "2-byte-int4", "1.8-byte")
            axis.annotate(
                preset.name, at, xytext=(4, 5 if above else -10), textcoords="offset points", fontsize=7, color=colour
            )
        axis.axhline(0.0, color="0.6", linewidth=0.8)
        axis.set_title(panel, fontsize=10)
        axis.set_xlabel("bytes per parameter")
        axis.set_xlim(0.9, 2.5)
    axes[0].set_ylabel("gap to the best fp32 AdamW (%)")
    handles, labels = next((pair for axis in axes if (pair := axis.get_legend_handles_labels())[0]), ([], []))
    if handles:
        axes[-1].legend(handles, labels, fontsize=7, loc="upper right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
