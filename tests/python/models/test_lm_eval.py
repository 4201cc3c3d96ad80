"""The manual's wrapping of a loaded model for lm-eval-harness, on a task of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.manual import run_by
from tests.python.models.folders import SmolCut

from qcutlass import models

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " carrot soup", " seventeen"], "answer": 0},
    {"question": "Two plus two is", "choices": [" purple", " four", " Madrid in spring"], "answer": 1},
    {"question": "The sun rises in the", "choices": [" drawer", " algebra", " east"], "answer": 2},
]


def task(folder: Path) -> dict[str, Any]:
    """A task of choices by likelihood, whose questions are in a file."""
    path = folder / "questions.json"
    path.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    return {
        "task": "three_questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": str(folder / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }


def test_the_example_of_the_manual(
    smol: SmolCut, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install lm-eval")
    models.convert(smol.gptq().folder, tmp_path / "smollm2")
    example = run_by(repository / "docs/models.md", "tests/python/models/test_lm_eval.py").text
    code = example.replace('["arc_easy"]', "TASKS")
    assert code != example
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"TASKS": [task(tmp_path)]}
    exec(code, namespace)
    results, model, tokenizer = (namespace[name] for name in ("results", "model", "tokenizer"))
    likeliest = []
    for question in QUESTIONS:
        totals = []
        for choice in question["choices"]:
            before, whole = (
                tokenizer(text, return_tensors="pt")["input_ids"][0]
                for text in (question["question"], question["question"] + choice)
            )
            with torch.inference_mode():
                logits = model(whole[None]).logits[0, len(before) - 1 : -1].float().log_softmax(dim=1)
            totals.append(float(logits.gather(1, whole[len(before) :, None]).sum()))
        likeliest.append(totals.index(max(totals)))
    right = sum(found == question["answer"] for found, question in zip(likeliest, QUESTIONS, strict=True))
    assert results["results"]["three_questions"]["acc,none"] == right / len(QUESTIONS)
    assert len(results["samples"]["three_questions"]) == len(QUESTIONS)
