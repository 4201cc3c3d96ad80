"""Decoding with everything in place: its logits are those of the whole sequence, its tokens those of generate."""

from __future__ import annotations

import copy
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import qcutlass
from qcutlass import UnsupportedError

transformers = pytest.importorskip("transformers")
from qcutlass.models import stepping  # noqa: E402
from qcutlass.models.cache_argument import CACHE  # noqa: E402
from qcutlass.models.stepping import Decoder, in_steps  # noqa: E402

gpu = pytest.mark.gpu
VOCABULARY, PROMPT, STEPS = 96, 150, 12


def model_of(device: str, quantized: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.1,
    }
    config = transformers.LlamaConfig(**(sizes | options))
    model = transformers.LlamaForCausalLM(config).eval().to(device)
    if quantized:
        qcutlass.replace_linear(model, qcutlass.WeightOnly(bits=4, group_size=64))
    return model.half() if device == "cuda" else model


def prompts(device: str, padding: int, gap: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2, PROMPT + STEPS), generator=generator).to(device)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    mask[0, PROMPT // 2 : PROMPT // 2 + gap] = 0
    return ids, mask


def assert_steps_follow_the_sequence(
    device: str,
    padding: int,
    bound: float,
    fused: bool = False,
    gap: int = 0,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    model = model_of(device, **(config or {}))
    ids, mask = prompts(device, padding, gap)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits.float()
    if fused:
        qcutlass.fuse_block(model)
    decoder = Decoder(model, 2, PROMPT + STEPS, on_failure=pytest.fail, **options)
    for _ in range(2):  # from a used state too
        found = [decoder.prefill(ids[:, :PROMPT], mask[:, :PROMPT] if padding or gap else None).float()]
        for place in range(PROMPT, PROMPT + STEPS):
            decoder.tokens.copy_(ids[:, place : place + 1])
            found.append(decoder.step().float().clone())
        for step, logits in enumerate(found):
            error = (logits - expected[:, PROMPT - 1 + step]).abs().max()
            assert error < bound * expected.std(), f"step {step}: {error}"


@pytest.mark.parametrize("padding", [0, 40])
@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused"])
def test_steps_follow_the_sequence(padding: int, fused: bool) -> None:
    assert_steps_follow_the_sequence("cpu", padding, 1e-4, fused, compiled=False)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_prompts_may_have_gaps(compiled: bool) -> None:
    assert_steps_follow_the_sequence("cpu", 40, 1e-4, gap=30, compiled=compiled)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_each_number_of_sequences_is_compiled_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping.torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, graphs = model_of("cpu", num_hidden_layers=1), torch._dynamo.utils.counters["stats"]
    for batch in range(1, 11):  # more than torch would compile by itself
        before = graphs["unique_graphs"]
        decoder = Decoder(model, batch, 128, on_failure=pytest.fail)
        decoder.prefill(torch.ones(batch, 5, dtype=torch.int64))
        decoder.step()
        assert graphs["unique_graphs"] == before + 1
    ids = torch.ones(1, 5, dtype=torch.int64)
    with torch.inference_mode():
        torch.compile(model, fullgraph=True)(ids)  # none of these counts for the model itself


def test_steps_are_compiled_alike_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def compiler(function: Any, **options: Any) -> Any:
        seen.append(options)
        return function

    monkeypatch.setattr(stepping.torch, "compile", compiler)
    Decoder(model_of("cpu", num_hidden_layers=1), 1, 128)
    known = hasattr(torch._inductor.config, "deterministic")
    assert [options["options"] for options in seen] == [{"deterministic": True} if known else None]


@gpu
def test_decoders_of_several_sizes_follow_one_another() -> None:
    model = model_of("cuda")
    ids, _ = prompts("cuda", 0)
    for batch in (1, 2, 3):
        some = ids[[0] * batch]
        with torch.inference_mode():
            expected = model(some).logits[:, PROMPT].float()
        decoder = Decoder(model, batch, PROMPT + STEPS, on_failure=pytest.fail)
        decoder.prefill(some[:, :PROMPT])
        decoder.tokens.copy_(some[:, PROMPT : PROMPT + 1])
        assert (decoder.step().float() - expected).abs().max() < 3e-2 * expected.std()


def test_models_of_other_attention_are_told_apart() -> None:
    def neox() -> Any:
        config = transformers.GPTNeoXConfig(
            vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
        )
        return transformers.GPTNeoXForCausalLM(config).eval()

    assert stepping.obstacle(neox(), 128) is None  # does not say how many heads share keys
    capped = model_of("cpu", quantized=False)
    capped.config.attn_logit_softcapping = 50.0
    assert "soft cap" in str(stepping.obstacle(capped, 128))


HEADS = {
    "one": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
    "three": {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64},
    "eight": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
}


@gpu
@pytest.mark.parametrize("padding", [0, 140])
@pytest.mark.parametrize("config", HEADS.values(), ids=[f"{name} to a key" for name in HEADS])
def test_any_number_of_heads_shares_keys(padding: int, config: dict[str, Any]) -> None:
    assert_steps_follow_the_sequence("cuda", padding, 3e-2, gap=30, config=config)


@gpu
@pytest.mark.parametrize("padding", [0, 40])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused"])
def test_steps_follow_the_sequence_on_a_gpu(padding: int, graph: bool, compiled: bool, fused: bool) -> None:
    assert_steps_follow_the_sequence("cuda", padding, 3e-2, fused, compiled=compiled, graph=graph)


def test_a_model_on_several_devices_is_refused() -> None:
    """Its layers would count tokens on devices of their own."""
    model = model_of("cpu")
    model.lm_head.to("meta")
    assert stepping.obstacle(model, 8) == "its layers are on several devices"
    with pytest.raises(qcutlass.UnsupportedError, match="several devices"):
        Decoder(model, 1, 8)


def generated(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> list[list[int]]:
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, do_sample=False, **options
    )
    result: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return result


@pytest.mark.parametrize("padding", [0, 40])
def test_generate_gives_the_same_tokens_in_steps(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("cpu")
    ids, mask = prompts("cpu", padding)
    expected = generated(model, ids[:, :PROMPT], mask[:, :PROMPT])
    waited, steps, step = list[int](), list[int](), Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda decoder: steps.append(1) or step(decoder))  # type: ignore[func-returns-value]
    with in_steps(model, PROMPT + STEPS, compiled=False, on_first_step=lambda: waited.append(1)):
        assert generated(model, ids[:, :PROMPT], mask[:, :PROMPT]) == expected
        alone = generated(model, ids[:1, :PROMPT], mask[:1, :PROMPT])
        assert alone == expected[:1]
    assert not waited, "nothing is compiled"
    assert len(steps) == 2 * (STEPS - 1), "the prompt gives the first token"
    assert generated(model, ids[:, :PROMPT], mask[:, :PROMPT]) == expected
    assert "forward" not in vars(model)


def test_the_signature_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("cpu")
    with in_steps(model, 64, compiled=False):
        step = model(torch.tensor([[1, 2]]), use_cache=True, logits_to_keep=1)
        monkeypatch.setattr(stepping, "inspect", None)  # steps have what they need
        assert model(torch.tensor([[3]]), use_cache=True, **{CACHE: step[CACHE]}).logits.shape == (1, 1, VOCABULARY)


def test_sampling_goes_on_as_ever() -> None:
    model, (ids, mask) = model_of("cpu"), prompts("cpu", 0)
    options = {"attention_mask": mask[:, :9], "max_new_tokens": 8, "do_sample": True, "temperature": 2.0, "top_p": 0.9}
    texts = []
    for steps in (False, True, True):
        torch.manual_seed(5)
        if steps:
            with in_steps(model, 32, compiled=False):
                texts.append(model.generate(ids[:, :9], pad_token_id=0, **options).tolist())
        else:
            texts.append(model.generate(ids[:, :9], pad_token_id=0, **options).tolist())
    assert texts[0] == texts[1] == texts[2]


def test_what_steps_cannot_do_is_refused() -> None:
    model, (ids, mask) = model_of("cpu"), prompts("cpu", 0)
    with in_steps(model, 128, compiled=False), pytest.raises(ValueError, match=r"ids: expected \[2, 1 to 128\] tokens"):
        generated(model, ids, mask)
    with in_steps(model, 128, compiled=False), pytest.raises(ValueError, match="longer than 128 tokens"):
        generated(model, ids[:, :120], mask[:, :120])
    with in_steps(model, 128, compiled=False), pytest.raises(NotImplementedError, match="one token of each prompt"):
        generated(model, ids[:, :20], mask[:, :20], num_beams=2)
    assert "forward" not in vars(model)
    model = windowed("mistral", 8)
    told = "layers that attend to the last 8 tokens alone, fewer than a text of 9"
    with pytest.raises(NotImplementedError, match=told):
        Decoder(model, 1, 9)
    with pytest.raises(NotImplementedError, match=told), in_steps(model, 9):
        pass


def windowed(family: str, window: int) -> Any:
    """A model with a sliding window, in all of its layers or in the second of two."""
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.1,
        "sliding_window": window,
    }
    torch.manual_seed(0)
    if family == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)).eval()
    config = transformers.Qwen2Config(**sizes, use_sliding_window=True, max_window_layers=1)
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    return transformers.Qwen2ForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "traced"])
@pytest.mark.parametrize("fused", [False, True], ids=["as it is", "fused"])
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_texts_that_fit_into_a_window_are_made_in_steps(
    family: str, fused: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is attended to: prompts, padded ones too, that fill the window or leave room for tokens behind."""
    monkeypatch.setattr(stepping.torch, "compile", functools.partial(torch.compile, backend="eager"))
    model, (ids, mask) = windowed(family, 40), prompts("cpu", 7)
    expected = generated(model, ids[:, :28], mask[:, :28])
    if fused:
        qcutlass.fuse_block(model)
    with in_steps(model, 40, compiled=compiled, on_failure=pytest.fail):
        assert generated(model, ids[:, :28], mask[:, :28]) == expected
        with pytest.raises(ValueError, match="longer than 40 tokens"):
            generated(model, ids[:, :36], mask[:, :36])
        with pytest.raises(ValueError, match=r"ids: expected \[2, 1 to 40\] tokens"):
            generated(model, ids[:, :41], mask[:, :41])
    decoder = Decoder(model, 2, 40, compiled=compiled, on_failure=pytest.fail)
    with torch.inference_mode():
        whole = model(ids[:, :40]).logits
    assert (decoder.prefill(ids[:, :40]) - whole[:, -1]).abs().max() < 1e-4 * whole.std()
    decoder.prefill(ids[:, :39])
    decoder.tokens.copy_(ids[:, 39:40])
    assert (decoder.step() - whole[:, -1]).abs().max() < 1e-4 * whole.std()


def test_a_text_is_not_gone_on_with_after_another_was_read() -> None:
    model, (ids, _) = model_of("cpu"), prompts("cpu", 0)
    read = {"use_cache": True, "logits_to_keep": 1}
    with torch.inference_mode():
        expected = model(ids[:1, :10]).logits[:, 8:]
        with in_steps(model, 32, compiled=False):
            first = model(ids[:1, :9], **read)
            model(ids[:, :9], **read)  # of another number of prompts, which another decoder holds
            second = model(ids[:1, 9:10], **{**read, CACHE: first[CACHE]})
            found = torch.cat([first.logits, second.logits], dim=1)
            assert (found - expected).abs().max() < 1e-4 * expected.std()
            model(ids[1:, :9], **read)
            with pytest.raises(NotImplementedError, match="no longer has this text"):
                model(ids[:1, 9:10], **{**read, CACHE: first[CACHE]})
        with pytest.raises(NotImplementedError, match="serves inside alone"):
            model(ids[:1, 9:10], **{**read, CACHE: first[CACHE]})
        with pytest.raises(NotImplementedError, match="serves inside alone"):
            copy.deepcopy(first[CACHE])


def interrupted(decoder: Decoder) -> None:
    raise KeyboardInterrupt


def test_a_text_is_not_gone_on_with_after_an_interrupted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, _) = model_of("cpu"), prompts("cpu", 0)
    with torch.inference_mode(), in_steps(model, 32, compiled=False):
        cache = model(ids[:1, :9], logits_to_keep=1)[CACHE]
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_compute", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:1, 9:10], **{CACHE: cache})
        with pytest.raises(NotImplementedError, match="a step was interrupted"):
            model(ids[:1, 9:10], **{CACHE: cache})


def test_threads_get_their_own_tokens_or_a_refusal() -> None:
    model, (ids, mask) = model_of("cpu"), prompts("cpu", 0)
    texts = [(ids[:1, :9], mask[:1, :9]), (ids[1:, :7], mask[1:, :7]), (ids[:, :8], mask[:, :8])]
    expected = [generated(model, *text) for text in texts]
    found: list[list[Any]] = [[] for _ in texts]

    def run(place: int) -> None:
        for _ in range(3):
            try:
                found[place].append(generated(model, *texts[place]))
            except UnsupportedError:
                found[place].append(None)

    with in_steps(model, 32, compiled=False):
        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for place, results in enumerate(found):
        assert len(results) == 3
        assert all(result in (expected[place], None) for result in results)
    assert found[2] == [expected[2]] * 3, "nobody else has two prompts"


CALLS: dict[str, dict[str, Any]] = {
    "all logits": {},
    "labels": {"labels": "ids"},
    "hidden states": {"output_hidden_states": True, "logits_to_keep": 1},
    "no cache": {"use_cache": False, "logits_to_keep": 1},
    "embeddings": {"inputs_embeds": "ids", "input_ids": None, "logits_to_keep": 1},
    "positions": {"position_ids": torch.tensor([[0, 1, 5, 6]]), "logits_to_keep": 1},
    "padded on the right": {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]), "logits_to_keep": 1},
    "a tuple": {"return_dict": False, "logits_to_keep": 1},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_other_calls_are_the_models_own(options: dict[str, Any]) -> None:
    model, (ids, _) = model_of("cpu"), prompts("cpu", 0)
    options = {"input_ids": ids[:, :4]} | options
    with torch.inference_mode():
        if "labels" in options:
            options["labels"] = ids[:, :4]
        if "inputs_embeds" in options:
            options["inputs_embeds"] = model.get_input_embeddings()(ids[:, :4])
        expected = model(**options)
        with in_steps(model, 32, compiled=False):
            found = model(**options)
            if options["input_ids"] is not None and "return_dict" not in options and "use_cache" not in options:
                again = model(ids[:, 4:5], **{CACHE: found[CACHE]})  # nor is a cache of its own
                assert again.logits.shape == (2, 1, VOCABULARY)
    assert type(found) is type(expected)
    names = expected.keys() if isinstance(expected, dict) else ()
    assert list(names) == list(found.keys() if names else ())
    for name in {"loss", "logits"}.intersection(names):
        assert torch.equal(found[name], expected[name])


def test_generate_runs_without_steps_where_it_asks_for_more() -> None:
    model, (ids, mask) = model_of("cpu"), prompts("cpu", 0)
    some = {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 3, "pad_token_id": 0}
    mask[0, 15:20] = 0  # padded on the right
    expected = model.generate(ids[:, :20], attention_mask=mask[:, :20], do_sample=False, **some)
    with in_steps(model, 64, compiled=False):
        found = model.generate(ids[:, :20], attention_mask=mask[:, :20], do_sample=False, **some)
        assert torch.equal(found.sequences, expected.sequences)
        assert len(found.hidden_states) == 3
        for use_cache in (True, False):
            options = {"max_new_tokens": 3, "pad_token_id": 0, "use_cache": use_cache}
            right = model.generate(ids[:, :20], attention_mask=mask[:, :20], do_sample=False, **options)
            assert torch.equal(right, expected.sequences)


def test_what_a_step_does_not_take_is_named() -> None:
    model, (ids, _) = model_of("cpu"), prompts("cpu", 0)
    with torch.inference_mode(), in_steps(model, 32, compiled=False):
        cache = {CACHE: model(ids[:, :4], logits_to_keep=1)[CACHE]}
        for options in ({"labels": ids[:, 4:5]}, {"output_attentions": True}, {"use_cache": False}):
            with pytest.raises(NotImplementedError, match=next(iter(options))):
                model(ids[:, 4:5], **cache, **options)
        with pytest.raises(NotImplementedError, match="already"), in_steps(model, 32):
            pass
    model.forward = own = functools.partial(type(model).forward, model)  # as hooks of others put one there
    with in_steps(model, 32, compiled=False):
        assert model.forward is not own
    assert model.forward is own


@pytest.mark.parametrize(
    ("mask", "words"),
    [(torch.tensor([[1, 1, 0]]), "pad on the left"), (torch.ones(1, 4), r"expected \[1, 3\].*got \[1, 4\]")],
)
def test_prompts_are_padded_on_the_left(mask: Tensor, words: str) -> None:
    decoder = Decoder(model_of("cpu"), 1, 8, compiled=False)
    with pytest.raises(ValueError, match=words):
        decoder.prefill(torch.ones(1, 3, dtype=torch.int64), mask)
