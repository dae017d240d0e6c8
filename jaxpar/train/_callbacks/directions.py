"""In which direction a metric is better, where its name tells.

A direction is guessed only where each word of a name is known: one that is not may turn it round, as in "neg_loss",
"loss_improvement" or "brier_score".
"""

from __future__ import annotations

import re
from typing import Literal

Mode = Literal["auto", "min", "max"]

_UP = frozenset(
    "acc accuracy auc auroc auprc precision recall f1 r2 bleu rouge iou miou dice ndcg mrr top psnr ssim likelihood "
    "correct map reward".split()
)
_DOWN = frozenset(
    "loss losses error errors err perplexity ppl mse rmse mae mape nll bpc wer cer divergence fid regret".split()
)
_NEUTRAL = frozenset(
    "eval test train training val valid validation dev holdout own my main total sum mean avg average median running "
    "smoothed ema batch epoch step macro micro weighted balanced binary categorical class classification regression "
    "segmentation reconstruction aux auxiliary word token character char sequence pixel masked squared absolute root "
    "log softmax sigmoid cross entropy kl l1 l2 huber at k rate score exact sample".split()
)
_NAME = re.compile(r"[a-z0-9]+([_/. @-][a-z0-9]+)*")  # no sign before a word, and no formula


def resolve_mode(monitor: str, mode: Mode, caller: str) -> str:
    """ "min" or "max". `ValueError` if the name of the metric does not tell which."""
    direction = direction_of(monitor) if mode == "auto" else mode
    if direction is None:
        raise ValueError(
            f"{caller}: the name {monitor!r} does not tell whether more or less is better; give mode='min' or "
            "mode='max'"
        )
    return direction


def direction_of(name: str) -> str | None:
    """ "min" or "max" where the name of a metric tells it for certain: "eval_loss", "top5_accuracy", "crossEntropy"."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if _NAME.fullmatch(name) is None:
        return None
    directions: set[str] = set()
    name_words: list[str] = []
    for word in re.split(r"[^a-z0-9]", name):
        is_known = word in _UP | _DOWN | _NEUTRAL
        name_words += [word] if is_known else re.findall(r"[a-z]+|[0-9]+", word)  # top5
    for i, word in enumerate(name_words):
        if word.isdecimal():  # recall_at_5 and loss_0, but not 1-acc
            if i + 1 < len(name_words) and name_words[max(i - 1, 0)] not in ("top", "at"):
                return None
        elif word in _UP:
            directions.add("max")
        elif word in _DOWN or (word == "entropy" and name_words[i - 1] == "cross"):
            directions.add("min")
        elif word not in _NEUTRAL:
            return None
    if len(directions) != 1 or ("score" in name_words and "min" in directions):
        return None
    return directions.pop()
