"""SmoothQuant on whole models: which layers are smoothed, and what that saves of a model with outliers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.manual import run_by
from tests.python.modules import Block, Decoder, RMSNorm, randomized
from torch import Tensor, nn

import qcutlass
from qcutlass import W8A8
from qcutlass.algorithms.calibration import ActivationStatistics

FOLDED = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]


def decoder(seed: int) -> tuple[Decoder, Tensor, dict[str, ActivationStatistics]]:
    """A random model, tokens, and what it calibrates to on them."""
    model = Decoder(blocks=2)
    randomized(model, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "proj" in name:
                parameter.div_(parameter.shape[1] ** 0.5)
    tokens = torch.randint(0, 16, (8, 12), generator=torch.Generator().manual_seed(seed))
    return model, tokens, recorded(model, tokens)


def recorded(model: nn.Module, tokens: Tensor) -> dict[str, ActivationStatistics]:
    with torch.no_grad(), qcutlass.calibrate(model) as statistics:
        model(tokens)
    return statistics


def relative(out: Tensor, expected: Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def test_llama_like_blocks_are_smoothed(seed: int) -> None:
    model, tokens, statistics = decoder(seed)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        before = model(tokens)
        smoothed = qcutlass.smooth_model(model, statistics, alpha=0.75)
        assert relative(model(tokens), before) < 2.0**-18
    norms = ["input_layernorm", "post_attention_layernorm"]
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])}
    assert changed == {f"layers.{i}.{part}.weight" for i in range(2) for part in (*norms, *FOLDED)}
    folded_layers = {f"layers.{i}.{part}" for i in range(2) for part in FOLDED}
    again = recorded(model, tokens)
    for name, record in smoothed.items():
        if name in folded_layers:
            assert record.smooth is None
            assert relative(record.minimum, again[name].minimum) < 2.0**-16
            assert relative(record.maximum, again[name].maximum) < 2.0**-16
        else:
            assert record.smooth is not None
            expected = qcutlass.smooth(statistics[name].absmax, weights[f"{name}.weight"], 0.75)
            assert torch.equal(record.smooth, expected)
            assert record.maximum is statistics[name].maximum
    attention = [weights[f"layers.0.{name}.weight"] for name in FOLDED[:3]]
    s = qcutlass.smooth(statistics["layers.0.self_attn.q_proj"].absmax, attention, 0.75)
    assert torch.equal(model.layers[0].input_layernorm.weight, weights["layers.0.input_layernorm.weight"] / s)


def test_named_groups_are_smoothed_and_no_others(seed: int) -> None:
    model, tokens, statistics = decoder(seed)
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    groups = [("layers.1.mlp.up_proj", ["layers.1.mlp.down_proj"]), ("norm", ["lm_head"])]
    with torch.no_grad():
        before = model(tokens)
        smoothed = qcutlass.smooth_model(model, statistics, groups=groups, others=False)
        assert relative(model(tokens), before) < 2.0**-18
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])}
    assert changed == {
        f"{name}.weight" for name in ("layers.1.mlp.up_proj", "layers.1.mlp.down_proj", "norm", "lm_head")
    }
    assert all(record.smooth is None for record in smoothed.values())
    assert torch.equal(smoothed["layers.0.mlp.down_proj"].maximum, statistics["layers.0.mlp.down_proj"].maximum)


def _without_a_norm(block: Block) -> None:
    block.post_attention_layernorm, block.norm2 = nn.Identity(), block.post_attention_layernorm
    del block.post_attention_layernorm


def _with_norms_behind(block: Block) -> None:
    block.pre_feedforward_layernorm = RMSNorm(64)


@pytest.mark.parametrize("change", [_without_a_norm, _with_norms_behind])
def test_blocks_wired_in_another_way_are_not_guessed_at(change: Callable[[Block], None], seed: int) -> None:
    model, _, statistics = decoder(seed)
    for block in model.layers:
        change(block)
    with pytest.raises(ValueError, match="groups: found no block whose only norms are"):
        qcutlass.smooth_model(model, statistics)


def _add_input(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
    return out + inputs[0]


def test_norms_that_others_read_are_left_alone_in_models_that_can_be_run(seed: int) -> None:
    """As in MiniMax, whose residual is what the norm gives: factors in such a norm gave another model."""
    model, tokens, statistics = decoder(seed)
    model.dummy_inputs = {"tokens": tokens[:1]}  # type: ignore[assignment]  # as transformers' models have them
    for block in model.layers:
        block.self_attn.register_forward_hook(_add_input)
    model.layers[0].train()
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        before = model(tokens)
        smoothed = qcutlass.smooth_model(model, statistics)
        assert relative(model(tokens), before) < 2.0**-18
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])}
    mlp = ["post_attention_layernorm", *FOLDED[3:]]
    assert changed == {f"layers.{i}.{part}.weight" for i in range(2) for part in mlp}
    assert smoothed["layers.0.self_attn.q_proj"].smooth is not None
    assert model.layers[0].training
    assert not any(module._forward_pre_hooks for module in model.modules())

    for block in model.layers:
        block.mlp.register_forward_hook(_add_input)
    with pytest.raises(ValueError, match="groups: found no block whose only norms are"):
        qcutlass.smooth_model(model, statistics)


QKV = [f"layers.0.{name}" for name in FOLDED[:3]]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([], ValueError, "groups: found no block"),
        ([("layers.0.norm", QKV)], ValueError, "groups: the model has no module 'layers.0.norm'"),
        ([("layers.0.input_layernorm", QKV[0])], TypeError, "groups: expected a list of names after"),
        ([("layers.0.input_layernorm", [name]) for name in QKV], ValueError, "input_layernorm' comes twice"),
        ([("layers.0.input_layernorm", QKV), ("norm", QKV[:1])], ValueError, "q_proj' comes twice"),
        ([("layers.0.input_layernorm", QKV), ("norm", [])], ValueError, "one linear or more after 'norm', got none"),
        ([("layers.0.input_layernorm", QKV), ("norm", ["layers.1.mlp"])], ValueError, "none for 'layers.1.mlp'"),
        (
            [("layers.0.input_layernorm", QKV), ("layers.0.mlp.up_proj", ["lm_head"])],
            ValueError,
            r"group layers.0.mlp.up_proj -> lm_head: s, for norm_or_linear: expected shape \[K\] = \[128\]",
        ),
        ([("layers.0.input_layernorm", QKV), ("tied", ["lm_head"])], ValueError, "'tied' is also another module's"),
    ],
)
def test_groups_that_cannot_be_folded_change_nothing(groups: Any, error: type[Exception], message: str) -> None:
    model, _, statistics = decoder(1)
    model.tied = RMSNorm(64)
    model.tied.weight = model.layers[1].input_layernorm.weight
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(error, match=message):
        qcutlass.smooth_model(model, statistics, groups=groups)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def chained() -> tuple[nn.Module, dict[str, ActivationStatistics]]:
    """A model in fp16 whose middle Linear is behind the norm and before the last one; each pair alone folds."""
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).half()
    with torch.no_grad():
        model[1].weight.fill_(10)
        model[3].weight.fill_(100)
    statistics = {
        "1": ActivationStatistics(torch.zeros(2), torch.full((2,), 1e5)),
        "3": ActivationStatistics(torch.zeros(2), torch.full((2,), 1e-2)),
    }
    return model, statistics


def test_groups_that_fail_together_change_nothing() -> None:
    groups = [("0", ["1"]), ("1", ["3"])]
    for group in groups:
        model, statistics = chained()
        qcutlass.smooth_model(model, statistics, groups=[group])
    model, statistics = chained()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"^group 1 -> 3: norm_or_linear.weight: smoothing overflows"):
        qcutlass.smooth_model(model, statistics, groups=groups)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_weight_that_cannot_be_written_leaves_the_others_as_they_were() -> None:
    model, statistics = chained()
    model[3].weight = nn.Parameter(torch.full((1, 1), 100.0).half().expand(2, 2))  # its elements share one address
    statistics["3"] = ActivationStatistics(torch.zeros(2), torch.full((2,), 400.0))
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"^group 1 -> 3: .*single memory location"):
        qcutlass.smooth_model(model, statistics, groups=[("0", ["1"]), ("1", ["3"])])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_factors_need_statistics(seed: int) -> None:
    model, _, statistics = decoder(seed)
    del statistics["layers.1.self_attn.v_proj"]
    with pytest.raises(ValueError, match=r"statistics: none for 'layers\.1\.self_attn\.v_proj'; was it called"):
        qcutlass.smooth_model(model, statistics)


# The measured example: a decoder that adds neighbouring tokens, and channels of its activations made huge.


def tokens_and_sums(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random sequences, and the sums modulo 16 of each token and the one before it."""
    tokens = torch.randint(0, 16, (count, 12), generator=torch.Generator().manual_seed(seed))
    return tokens, (tokens[:, 1:] + tokens[:, :-1]) % 16


def trained() -> Decoder:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(300):
        tokens, sums = tokens_and_sums(32, seed=step)
        loss = nn.functional.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), sums.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def plant_outliers(model: Decoder) -> None:
    """Multiplies 6 channels of the inputs of most linears by 64 to 512, and divides the linears' columns: exact."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.layers:
            mlp = block.mlp
            for previous, linears in (
                (block.input_layernorm, block.self_attn.inputs),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
                (mlp.up_proj, (mlp.down_proj,)),
            ):
                channels = torch.randperm(linears[0].in_features, generator=generator)[:6]
                factors = torch.exp2(torch.randint(6, 10, (6,), generator=generator))
                previous.weight[channels] *= factors if previous.weight.dim() == 1 else factors[:, None]
                for linear in linears:
                    linear.weight[:, channels] /= factors


@pytest.fixture(scope="module")
def outliers() -> tuple[Decoder, dict[str, ActivationStatistics]]:
    """A model that does its task, with outliers, and what it calibrates to on tokens of its own."""
    model = trained()
    tokens, _ = tokens_and_sums(64, seed=1000)
    with torch.no_grad():
        before = model(tokens)
        plant_outliers(model)
        assert relative(model(tokens), before) < 2.0**-18  # the planting changed no function
    return model, recorded(model, tokens)


def measured(model: Decoder, expected: Tensor | None = None) -> tuple[float, float, Tensor]:
    """Accuracy on new tokens, error relative to the `expected` logits, logits."""
    tokens, sums = tokens_and_sums(256, seed=2000)
    with torch.no_grad():
        logits = model(tokens)
    accuracy = float((logits[:, 1:].argmax(-1) == sums).float().mean())
    return accuracy, 0.0 if expected is None else relative(logits, expected), logits


@pytest.mark.parametrize("scheme", [W8A8(), W8A8(symmetric=False), W8A8("static"), W8A8("static", False)], ids=str)
def test_smoothing_saves_what_outliers_cost(
    scheme: W8A8, outliers: tuple[Decoder, dict[str, ActivationStatistics]]
) -> None:
    model, statistics = outliers
    accuracy, _, logits = measured(model)
    assert accuracy > 0.99

    plain = copy.deepcopy(model)
    qcutlass.replace_linear(plain, scheme, statistics=statistics)
    plain_accuracy, plain_error, _ = measured(plain, logits)

    smoothed = copy.deepcopy(model)
    qcutlass.replace_linear(smoothed, scheme, statistics=qcutlass.smooth_model(smoothed, statistics))
    smooth_accuracy, smooth_error, _ = measured(smoothed, logits)

    folded_only = copy.deepcopy(model)
    qcutlass.replace_linear(
        folded_only, scheme, statistics=qcutlass.smooth_model(folded_only, statistics, others=False)
    )
    _, folded_error, _ = measured(folded_only, logits)

    assert plain_accuracy < 0.8
    assert smooth_accuracy > 0.98
    assert plain_error > 10 * smooth_error
    assert folded_error > 4 * smooth_error  # nothing takes the factors of down_proj but the layer itself
    assert smooth_error < 0.05


def test_the_example_of_the_manual(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(run_by(repository / "docs/layers.md", "tests/python/test_smoothquant_models.py").text, {})
    printed = capsys.readouterr().out
    errors = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) -> ([\d.]+)", printed)]
    assert len(errors) == 2
    assert all(plain > 20 * smoothed for plain, smoothed in errors), printed
