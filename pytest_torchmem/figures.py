"""The names of a profile's figures; nothing here imports torch."""

FIGURES = (
    "baseline",
    "forward_peak",
    "backward_peak",
    "optimizer_peak",
    "peak",
    "retained",
    "end",
    "reserved_peak",
)
"""Every figure, in the order in which they are shown."""
