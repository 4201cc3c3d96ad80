"""Mixtures of experts on a GPU: logits of folders of several formats, and texts in captured steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.python.models.mixtures import VOCABULARY, MixtureCut
from torch import Tensor

from qcutlass.models.experts import is_router
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")
from qcutlass.models.stepping import Decoder, in_steps
from qcutlass.models.transformers import load_model

pytestmark = pytest.mark.gpu

PROMPT, STEPS, PROMPTS = 4, 6, 3
DRAWN = 512
MARGIN = 0.1
"""By how much logits of the router and of the next token, of a deviation of about 1, are decided at least: bfloat16
moves them by some 0.01, float16 by a tenth of that."""
CASES = [
    ("mixtral", "gptq", torch.float16),
    ("qwen3_moe", "awq", torch.float16),
    ("deepseek_v3", "compressed", torch.float16),
    ("deepseek_v3", "fp8", torch.float16),
    ("mixtral", "gptq", torch.bfloat16),
]


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MixtureCut]:
    kinds = dict.fromkeys(kind for kind, _, _ in CASES)  # in one order: their weights are drawn one after the other
    return {kind: MixtureCut(tmp_path_factory.mktemp(kind), kind) for kind in kinds}


def generated(model: Any, ids: Tensor) -> Tensor:
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": STEPS, "do_sample": False}
    text: Tensor = model.generate(ids, **options)
    return text


def decided(exact: Any) -> Tensor:
    """Texts, prompts with what the model makes of them, in which rounding changes no expert and no token.

    Else a correct model may differ from another by all that one expert does.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (DRAWN, PROMPT), generator=generator)
    text = generated(exact, ids)
    margins: list[Tensor] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        of_experts = output[0] if isinstance(output, tuple) else output
        margins.append(gap(of_experts.view(DRAWN, -1, of_experts.shape[-1]), exact.config.num_experts_per_tok))

    hooks = [each.register_forward_hook(note) for name, each in exact.named_modules() if is_router(name)]
    with torch.inference_mode():
        logits = exact(text[:, :-1]).logits
    for hook in hooks:
        hook.remove()
    assert margins
    least = torch.cat([*margins, gap(logits, 1)[:, PROMPT - 1 :]], dim=1).amin(1)
    best = least.topk(PROMPTS)
    assert float(best.values.min()) > MARGIN
    return text[best.indices]


def gap(values: Tensor, count: int) -> Tensor:
    """Between the last of so many largest ones and the next."""
    ordered = values.sort(dim=-1, descending=True).values
    return ordered[..., count - 1] - ordered[..., count]


@pytest.mark.parametrize(("kind", "form", "dtype"), CASES, ids=str)
def test_logits_and_texts(
    kind: str, form: str, dtype: torch.dtype, cuts: dict[str, MixtureCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the dequantised model; steps are captured, or the test fails, and make the tokens of eager ones."""
    cut = getattr(cuts[kind], form)()
    exact = cuts[kind].dense(cut, torch.float64)
    text = decided(exact)
    model, ids = load_model(cut.folder, "cuda", dtype)[0], text.cuda()
    with torch.inference_mode():
        dense = cuts[kind].dense(cut, dtype).cuda()(ids).logits
        assert noise_ratio(model(ids).logits.cpu(), dense.cpu(), exact(text).logits) <= NOISE
    prompts = ids[:, :PROMPT].contiguous()
    assert torch.equal(generated(model, prompts), ids)
    steps, step = list[bool](), Decoder.step

    def counted(decoder: Decoder) -> Tensor:
        found = step(decoder)
        steps.append(decoder._replay is not None)
        return found

    monkeypatch.setattr(Decoder, "step", counted)
    with in_steps(model, PROMPT + STEPS, compiled=False, on_failure=pytest.fail):
        assert torch.equal(generated(model, prompts), ids)
    assert steps == [True] * (STEPS - 1)  # replays; the prompt gives the first token
