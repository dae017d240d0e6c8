"""The gradients of a repeated block: copies like the layers, wherever they stand."""

from __future__ import annotations

from itertools import zip_longest

from .net import Draft


def gradients_of(
    copies: list[list[Draft]], backward: dict[int, list[Draft]], sources: dict[int, set[int]]
) -> list[dict[int, Draft]]:
    """The gradients of each layer of a block, by the number of the copy, which become one as the layers do.

    A copy may read less than the others, as where a sum begins that goes through all of them. One copy may lack a
    gradient, as what begins a network has none for its input.

    Args:
        copies: the layers of each copy.
        backward: by the place of a layer, its gradients.
        sources: what each draft reads.

    Returns:
        Each with the first to be computed in front. Nothing where the copies have different gradients, or where what
        is between them would be in a circle.
    """
    found: list[dict[int, Draft]] = []
    for layers in zip(*copies, strict=True):
        for same in zip_longest(*(backward.get(layer.at, ()) for layer in layers)):
            there = [(copy, gradient) for copy, gradient in enumerate(same) if gradient is not None]
            found.append(dict(sorted(there, key=lambda each: each[1].at)))
    few = any(len(same) < max(2, len(copies) - 1) for same in found)
    alike = all(len({_kind(gradient) for gradient in same.values()}) == 1 for same in found)
    in_place = all(g.forward is not None and g.scope == g.forward.scope for same in found for g in same.values())
    return found if alike and in_place and not few and _is_in_order(found, sources) else []


def _kind(gradient: Draft) -> tuple[str, str, int]:
    return gradient.op, gradient.detail, gradient.repeat


def _is_in_order(found: list[dict[int, Draft]], sources: dict[int, set[int]]) -> bool:
    """Whether the first of each, in the place of all, comes after all that any of them reads. So there is no circle."""
    kept = {draft.at: next(iter(same.values())).at for same in found for draft in same.values()}
    copy_of = {draft.at: copy for same in found for copy, draft in same.items()}
    return all(
        copy_of.get(source, copy_of[at]) != copy_of[at] or kept.get(source, source) < kept[at]
        for at in kept
        for source in sources.get(at, ())
    )
