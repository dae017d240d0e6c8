"""Elastic runs: processes may be lost and may join while `fit` runs.

    member      the steps of process 0, and those of the others, which follow it; a stuck process is ended
    group       who computes, what they agreed on, and whether a block of work succeeded in all of them;
                one that would compute something else is refused

`train._fit.fit` imports this room, in an elastic run only.
"""
