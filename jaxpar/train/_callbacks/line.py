"""The line that is shown about an epoch."""

from __future__ import annotations

from .history import NO_METRICS, Record, number_text


def line(record: Record, epochs: int | None = None, unit: str = "images") -> str:
    """One line about an epoch: its metrics, except columns such as `eval_recall/0`, and its speed.

    Args:
        epochs: how many the run has.
        unit: what the data consists of.

    >>> line({"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": None, "seconds": 2.0,
    ...       "images_per_second": 30000.0}, 5)
    'epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s'
    """
    words = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name, value in record.items():
        if name not in NO_METRICS and "/" not in name and value is not None and not isinstance(value, bool):
            words.append(f"{name.replace('_', ' ')} {number_text(value)}")
    words += [f"{record['seconds']:.1f} s", f"{record['images_per_second']:,.0f} {unit}/s"]
    return "  ".join(words)
