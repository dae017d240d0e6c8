"""The line that is shown about an epoch."""

from __future__ import annotations

from .history import Record


def line(record: Record, epochs: int | None = None) -> str:
    """One line about an epoch.

    >>> line({"epoch": 1, "loss": 2.3, "accuracy": 0.1, "test_accuracy": None, "seconds": 2.0,
    ...       "images_per_second": 30000.0}, 5)
    'epoch 1/5  loss 2.3000  accuracy 0.1000  2.0 s  30,000 images/s'
    """
    words = [f"epoch {record['epoch']}" + (f"/{epochs}" if epochs else "")]
    for name in ("loss", "accuracy", "test_loss", "test_accuracy"):
        if record.get(name) is not None:
            words.append(f"{name.replace('_', ' ')} {record[name]:.4f}")
    words += [f"{record['seconds']:.1f} s", f"{record['images_per_second']:,.0f} images/s"]
    return "  ".join(words)
