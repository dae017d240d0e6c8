"""Elastic runs: processes may be lost and may join while `fit` runs. Only `train._fit.fit` imports it."""
