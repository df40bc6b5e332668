"""The partial score of short texts that question-answering sets report beside exact match."""

from __future__ import annotations

from collections import Counter

from umad.grading.forms import normal_words
from umad.grading.relation import plain_text


def token_f1(gold: str, candidate: str | None) -> float:
    """F1 of the words that two short texts share (Rajpurkar et al. 2016); yes, no and "noanswer" only match whole."""
    if candidate is None:
        return 0.0
    wanted, found = normal_words(plain_text(gold)), normal_words(plain_text(candidate))
    whole = ("yes", "no", "noanswer")
    if wanted == found:
        return 1.0
    if wanted in whole or found in whole:
        return 0.0
    left, right = wanted.split(), found.split()
    shared = sum((Counter(left) & Counter(right)).values())
    return 2 * shared / (len(left) + len(right)) if shared else 0.0
