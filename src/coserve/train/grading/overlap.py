"""Metrics of the words that two texts share, by the libraries that define them; called in a sandbox
(`similarity.py`), as they are slow programs on a tenant's texts."""

from functools import cache
from importlib import import_module
from typing import Any


def overlap(metric: str, found: str, wanted: str) -> float:
    """The metric, by OpenAI's name, of the text found and the reference, from 0 to 1: NLTK's BLEU of a
    sentence (its first smoothing) and GLEU, of words between white space, and the F-measure of Google's
    rouge-score."""
    if metric == "bleu":
        bleu = import_module("nltk.translate.bleu_score")
        smoothing = bleu.SmoothingFunction().method1
        return float(bleu.sentence_bleu([wanted.split()], found.split(), smoothing_function=smoothing))
    if metric == "gleu":
        gleu = import_module("nltk.translate.gleu_score").sentence_gleu
        return float(gleu([wanted.split()], found.split()))
    name = metric.replace("rouge_", "rouge").replace("rougel", "rougeL")
    return float(_scorer(name).score(wanted, found)[name].fmeasure)


@cache
def _scorer(name: str) -> Any:
    return import_module("rouge_score.rouge_scorer").RougeScorer([name])
