"""The metrics of other libraries in docs/evaluate.md, beside scikit-learn's."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpar as jp

PAGE = Path(__file__).parents[2] / "docs/evaluate.md"


@pytest.mark.others
@pytest.mark.parametrize("batch_size", [64, 48])
def test_the_metrics_of_the_page_are_those_of_scikit_learn(batch_size):
    pytest.importorskip("metrax", reason="the extra `others` is not installed")
    sklearn = pytest.importorskip("sklearn.metrics", reason="the extra `others` is not installed")
    page = PAGE.read_text()
    first = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0]
    own = re.findall(r"^<!-- not run: .*?^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    namespace = {}
    with jax.numpy_rank_promotion("allow"):  # metrax compares with its thresholds so
        for block in (first, *own):
            exec(block.replace("epochs=20", "epochs=2").replace("batch_size=64", f"batch_size={batch_size}"), namespace)
    state, apply_fn, test = (namespace[name] for name in ("state", "apply_fn", "test"))
    logits = jp.train.predict(state, apply_fn, test)
    found, chance = logits.argmax(axis=1), 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
    last = namespace["history"][-1]
    assert last["eval_auroc"] == pytest.approx(sklearn.roc_auc_score(test.labels, chance), abs=0.01)  # by thresholds
    assert last["eval_recall"] == pytest.approx(sklearn.recall_score(test.labels, found), abs=1e-5)
    assert last["eval_f1"] == pytest.approx(sklearn.f1_score(test.labels, found), abs=1e-5)
    assert last["eval_iou"] == pytest.approx(sklearn.jaccard_score(test.labels, found), abs=1e-5)
    assert namespace["macro"] == sklearn.f1_score(test.labels, found, average="macro")
    assert 0 < float(namespace["bleu"]) <= 1
