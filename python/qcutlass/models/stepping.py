"""Decoding with everything in place: a static cache, a compiled step, a CUDA graph.

A step of decoding reads every weight once and computes little, so what lies between the products decides. An eager
step of transformers launches some 1700 kernels from Python and is bound by the host; compiled it has 500, and as a
CUDA graph it is one launch.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from qcutlass.errors import UnsupportedError
from qcutlass.models import compiling, step_attention
from qcutlass.models.cache_argument import CACHE, pop_cache
from qcutlass.models.capturing import Captured, capture
from qcutlass.models.compiling import compiled_code as compiled_code
from qcutlass.models.growing_cache import PlacedLayer
from qcutlass.products.checks import check_integer

_SHAPES: Final = 256  # of steps that are compiled in a process; torch gives up compiling after 8


def obstacle(model: Any, length: int) -> str | None:
    """The reason why a `Decoder` cannot hold this model and texts of so many tokens; None if it can."""
    if "cache_position" in inspect.signature(LlamaModel.forward).parameters:
        return f"transformers {transformers.__version__} asks for more than a step has; update it"
    layers = StaticCache(config=model.config, max_cache_len=step_attention.BLOCK).layers
    if any(type(layer) not in (StaticLayer, StaticSlidingWindowLayer) for layer in layers):
        return "not all of its layers attend to all tokens before, as a graph of a step has to"
    window = _window(model)
    if length > window:
        return f"it has layers that attend to the last {window} tokens alone, fewer than a text of {length}"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "its layers are on several devices"
    if not getattr(model, "_supports_flex_attn", False):
        return f"{type(model).__name__} has no flex_attention"
    if not step_attention.is_plain(model):
        return "its attention has a soft cap or sinks"
    if step_attention.grouped_queries(model) is None:
        return "its layers share keys among different numbers of heads"
    if "seq_lengths" not in inspect.signature(BlockMask.from_kv_blocks).parameters:
        return f"torch {torch.__version__} is too old"
    return None


def _window(model: Any) -> int:
    """Tokens that all layers attend to, the last one included."""
    layers = StaticCache(config=model.config, max_cache_len=sys.maxsize).layers  # which takes no memory yet
    window: int = min(layer.max_cache_len for layer in layers)
    return window


def _warn(line: str) -> None:
    warnings.warn(line, RuntimeWarning, stacklevel=2)


class Decoder:
    """A model that reads prompts once and then makes a token of each at a time.

    Prompts run as the model is, with scaled-dot-product attention, and are not compiled anew for each length. Steps
    write into tensors that stay where they are. They are compiled by torch, with `flex_attention`, which reads the keys
    and values of grouped heads as they are stored (`step_attention`), and on a GPU captured in a CUDA graph. What was
    compiled is kept on disk, in `compiled_code()`.

    Attributes:
        tokens: int64 `[batch, 1]`, to be written before each step.
        length: tokens of a sequence that there is room for.

    Example:
        >>> from qcutlass.models.stepping import Decoder
        >>> def greedy(model, ids, count):  # [batch, prompt], without padding
        ...     decoder = Decoder(model, *ids.shape[:1], length=ids.shape[1] + count)
        ...     logits, made = decoder.prefill(ids), []
        ...     for _ in range(count):
        ...         made.append(logits.argmax(-1, keepdim=True))
        ...         decoder.tokens.copy_(made[-1])
        ...         logits = decoder.step()
        ...     return torch.cat(made, dim=1)
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        length: int,
        *,
        compiled: bool = True,
        graph: bool = True,
        on_failure: Callable[[str], object] = _warn,
    ) -> None:
        """
        Args:
            model: a causal language model of transformers, in evaluation mode.
            batch: sequences at a time.
            length: tokens of the longest sequence, prompt included; rounded up to a multiple of 128, or to the window
                of layers that attend to the last tokens alone.
            compiled: whether torch compiles the step, at its first use: half a minute for 32 blocks, less from disk.
            graph: whether steps are replays of a CUDA graph; on GPUs alone.
            on_failure: told in a line that torch cannot compile the step, say for want of a C compiler, or that it
                cannot be captured. Steps then run as the model is, or without a graph; by default a warning says so.

        Raises:
            UnsupportedError: `obstacle` says why.
        """
        why = obstacle(model, length)
        if why is not None:
            raise UnsupportedError(f"model: {why}; use the model's own generate")
        self._room = -(-length // step_attention.BLOCK) * step_attention.BLOCK
        self.length = min(self._room, _window(model))
        self._model, device = model, model.device
        self._compiled, self._graph, self._on_failure = compiled, graph and device.type == "cuda", on_failure
        self._is_ready = not (self._compiled or self._graph)
        self._positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._cache = StaticCache(config=model.config, max_cache_len=self._room)
        self._cache.layers = [PlacedLayer(self._room, self._place) for _ in self._cache.layers]
        self._begins = torch.zeros(batch, dtype=torch.int64, device=device)
        self._blocks = torch.zeros(batch, 1, 1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._plain: Callable[..., Any] = getattr(model.forward, "replaced", model.forward)  # in_steps replaces it
        self._forward = self._plain
        self._logits: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        if compiled:
            self._forward = compiling.compiled(self._plain)
        self._block_mask = self._new_block_mask() if compiled else None

    @torch.inference_mode()
    def prefill(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Reads prompts, from whatever state.

        Args:
            ids: int64 `[batch, prompt]`, padded on the left.
            mask: bool or integer `[batch, prompt]`, 0 for what is not attended to. None: all is.

        Returns:
            Logits `[batch, vocabulary]` behind the last token of each.

        Raises:
            ValueError: it has not as many prompts as there is room for; one is too long; it is padded on the right.
        """
        batch, count = ids.shape
        if batch != len(self.tokens) or not 0 < count <= self.length:
            raise ValueError(
                f"ids: expected [{len(self.tokens)}, 1 to {self.length}] tokens, got {list(ids.shape)}; make another "
                "Decoder for them"
            )
        if mask is not None and (mask.shape != ids.shape or not bool(mask[:, -1].all())):
            raise ValueError(
                f"mask: expected {list(ids.shape)}, 1 for the last token of each prompt, got {list(mask.shape)}"
                f"{' with 0 there' * (mask.shape == ids.shape)}; pad on the left (padding_side='left' of a tokenizer)"
            )
        self._cache.reset()  # and the place
        whole = torch.ones_like(ids) if mask is None else mask.to(ids.device, ids.dtype)
        self._begins.copy_(count - whole.bool().sum(-1))
        positions = (whole.cumsum(-1) - 1).clamp_(min=0)
        own = DynamicCache(config=self._model.config)  # a static one would be read to its end
        own.layers = [DynamicLayer() for _ in own.layers]  # those of windows drop the first of as many tokens
        with _attention(self._model, "sdpa"):
            result = self._plain(
                ids,
                attention_mask=None if mask is None else whole,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: own},
            )
        for index, layer in enumerate(own.layers):
            self._cache.update(*_in_a_row(layer.keys, layer.values, mask), index)
        self._place.fill_(count)
        self._positions.copy_(positions[:, -1:] + 1)
        logits: Tensor = result.logits[:, -1]
        return logits

    @property
    def is_ready(self) -> bool:
        """Whether a step runs at once: nothing is left to be compiled or captured."""
        return self._is_ready

    @torch.inference_mode()
    def step(self) -> Tensor:
        """One more token of each sequence: reads `tokens`.

        Returns:
            Logits `[batch, vocabulary]`, overwritten by the next step.
        """
        if self._replay is not None:
            self._replay()
        elif self._graph:
            self._capture()
        else:
            self._logits = self._compute()
        self._is_ready = True
        assert self._logits is not None
        return self._logits

    def _new_block_mask(self) -> BlockMask:
        queries = step_attention.grouped_queries(self._model)
        assert queries is not None  # or there is an obstacle
        return step_attention.block_mask(self._begins, self._place, self._blocks, self._room, queries)

    def _attended(self) -> Tensor | BlockMask:
        """What the tokens of this step attend to."""
        if self._block_mask is not None:
            self._blocks.copy_(self._place // step_attention.BLOCK + 1)
            return self._block_mask
        keys = torch.arange(self._room, device=self._place.device)
        return ((keys >= self._begins[:, None]) & (keys <= self._place))[:, None, None]

    def _compute(self) -> Tensor:
        result = None
        if self._compiled:
            try:
                result = self._called()
            except compiling.FAILURES as error:
                self._compiled, self._forward, self._block_mask = False, self._plain, None
                self._on_failure(compiling.failure(error))
        if result is None:  # the place is the same: keys that were written are written again
            result = self._called()
        self._place.add_(1)
        self._positions.add_(1)
        logits: Tensor = result.logits[:, -1]
        return logits

    def _called(self) -> Any:
        """The model's output for the tokens, whose keys and values are written at the place."""
        name = step_attention.NAME if self._compiled else "sdpa"
        with _attention(self._model, name), torch._dynamo.config.patch(recompile_limit=_SHAPES):
            return self._forward(
                self.tokens,
                attention_mask=self._attended(),
                position_ids=self._positions,
                use_cache=True,
                logits_to_keep=1,
                **{CACHE: self._cache},
            )

    def _state(self) -> list[Tensor]:
        """What a step changes besides keys and values."""
        return [self._place, self._positions]

    def _capture(self) -> None:
        """Computes this step, and makes those behind it replays of a graph, where there can be one."""
        found = capture(self._compute, self._state())
        if isinstance(found, Captured):
            self._logits, self._replay = found
            self._replay()
        else:
            self._graph = False
            self._on_failure(found)
            self._logits = self._compute()


def _in_a_row(keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values `[batch, heads, prompt, size]` with those that are attended to last, in their order.

    Their positions are in them, so where they are does not matter: gaps become padding on the left.
    """
    if mask is None:
        return keys, values
    order = mask.bool().int().argsort(dim=-1, stable=True)[:, None, :, None].to(keys.device)
    return keys.gather(2, order.expand_as(keys)), values.gather(2, order.expand_as(values))


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """The model with another implementation of attention."""
    config = model.config
    before = config._attn_implementation
    if before == name:
        yield
        return
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


class StepCache(Cache):
    """Stands for the keys and values of a `Decoder` where transformers' `generate` asks how many there are."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(layers=[])
        self.decoder = decoder
        self.count = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of each sequence so far, padding included."""
        return self.count

    def _unsupported(self, *arguments: object, **options: object) -> None:
        raise UnsupportedError(
            f"{CACHE}: in_steps makes one token of each prompt at a time, from a cache that serves inside alone; call "
            "generate outside"
        )

    # beams and assistants; the last two are what a model's own forward asks of a cache
    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = __deepcopy__ = _unsupported
    update = get_mask_sizes = _unsupported


class _Steps:
    """The decoders of a model inside `in_steps`, one for each number of prompts, and what `generate` calls there.

    A decoder holds the keys and values of one text of each prompt: those that were read last.
    """

    def __init__(
        self,
        model: Any,
        own: Callable[..., Any],
        length: int,
        compiled: bool,
        on_first_step: Callable[[], object],
        on_failure: Callable[[str], object],
    ) -> None:
        self._model, self._own, self._length, self._compiled = model, own, length, compiled
        self._signature = inspect.signature(own)  # which takes long: not at each step
        self._on_first_step, self._on_failure = on_first_step, on_failure
        self._graph = True
        self._decoders: dict[int, Decoder] = {}
        self._current: dict[int, StepCache] = {}  # by the number of prompts: whose keys and values its decoder holds
        self._lock = threading.RLock()  # a step changes how the model attends, for all threads

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """The model's, but for prompts that `generate` reads, and for steps."""
        with self._lock:
            return self._forward(*arguments, **options)

    def _forward(self, *arguments: Any, **options: Any) -> Any:
        named = self._signature.bind_partial(*arguments).arguments | options
        cache, ids = pop_cache(named), named.pop("input_ids", None)
        asked = {name for name, value in named.items() if value is not None and value is not False} - _OF_STEPS
        if isinstance(cache, StepCache):
            if asked or ids is None or named.get("use_cache") is False:
                words = ", ".join(sorted(asked)) or ("input_ids: None" if ids is None else "use_cache=False")
                raise UnsupportedError(f"{words}: a step of in_steps does not take this; call the model outside")
            logits = self._step(ids, cache)
        elif asked or not _is_prompt(ids, cache, **named):
            return self._own(*arguments, **options)
        else:
            logits, cache = self._read(ids, named.get("attention_mask"))
        cache.count += ids.shape[1]
        return CausalLMOutputWithPast(logits=logits[:, None], **{CACHE: cache})

    def _read(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, StepCache]:
        count = len(ids)
        if count not in self._decoders:
            self._decoders[count] = Decoder(
                self._model,
                count,
                self._length,
                compiled=self._compiled,
                graph=self._graph,
                on_failure=functools.partial(self._give_up, count),
            )
        self._current.pop(count, None)
        cache = StepCache(self._decoders[count])
        padded = mask is not None and not bool(mask.all())
        logits = cache.decoder.prefill(ids, mask if padded else None)
        self._current[count] = cache
        return logits, cache

    def _give_up(self, count: int, line: str) -> None:
        failed = self._decoders[count]  # what fails for one number of prompts takes as long for the others, and fails
        self._compiled, self._graph = failed._compiled, failed._graph
        self._on_failure(line)

    def _step(self, ids: Tensor, cache: StepCache) -> Tensor:
        decoder = cache.decoder
        count = len(decoder.tokens)
        if tuple(ids.shape) != (count, 1):
            cache._unsupported()
        if self._current.get(count) is not cache:
            raise UnsupportedError(
                f"{CACHE}: in_steps no longer has this text: other prompts ({count}, as these) were read since, or a "
                "step was interrupted; finish a text before the next is begun, in whatever thread, or call outside"
            )
        if cache.count >= decoder.length:
            raise ValueError(f"length: the sequence is longer than {decoder.length} tokens; pass in_steps a larger one")
        if self._compiled and not decoder.is_ready:
            self._on_first_step()
        del self._current[count]  # a step that is interrupted leaves half of its keys
        decoder.tokens.copy_(ids)
        logits = decoder.step()
        self._current[count] = cache
        return logits


_OF_STEPS: Final = {"attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep", "return_dict"}
"""The options of a call that a step follows, or of which `_is_prompt` says whether it does."""


def _is_prompt(
    ids: Tensor | None,
    cache: Any,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool | None = None,
    logits_to_keep: int | Tensor = 0,
    return_dict: bool | None = None,
    **others: object,
) -> bool:
    """Whether a call reads prompts as `generate` does, which `Decoder.prefill` does as well."""
    if ids is None or use_cache is False or return_dict is False:
        return False
    if not isinstance(logits_to_keep, int) or logits_to_keep != 1:
        return False
    if cache is not None and cache.get_seq_length() > 0:
        return False
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    if mask.shape != ids.shape or not bool(mask[:, -1:].all()):
        return False
    expected = mask.long().cumsum(-1) - 1
    return position_ids is None or not bool(((position_ids != expected) & mask.bool()).any())


@contextmanager
def in_steps(
    model: Any,
    length: int,
    *,
    compiled: bool = True,
    on_first_step: Callable[[], object] = lambda: None,
    on_failure: Callable[[str], object] = _warn,
) -> Iterator[None]:
    """Inside, transformers' own `generate` of this model runs on a `Decoder`, for prompts of any number.

    Every option of `generate` that asks for one token of each sequence at a time works: sampling, streamers, stopping
    criteria. Beam search is refused. What asks the model for more than the next token, such as `labels`, all logits or
    hidden states, for no cache, or to go on with a cache of one's own, runs as it does outside, without steps.

    There is one `Decoder` for each number of prompts, and it holds one text of each: a text that is gone on with after
    as many other prompts have been read, by another thread for example, is refused. Calls of threads take turns.

    Args:
        model: as for `Decoder`.
        length: tokens of the longest sequence, prompt included.
        compiled: as for `Decoder`.
        on_first_step: called before the first step of each number of prompts, which is compiled then.
        on_failure: as for `Decoder`; called once, as no other step is compiled then.

    Raises:
        UnsupportedError: as for `Decoder`; the model is in steps already; inside: see above.
        TypeError, ValueError: `length` is no positive number; inside: a sequence gets longer.

    Example:
        >>> from qcutlass.models.stepping import in_steps
        >>> def continued(model, tokenizer, prompt):
        ...     inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
        ...     with in_steps(model, length=2048):
        ...         return tokenizer.decode(model.generate(**inputs, max_new_tokens=128)[0])
    """
    check_integer("length", length, minimum=1)
    own = model.forward
    why = "it is in steps already" if hasattr(own, "replaced") else obstacle(model, length)
    if why is not None:
        raise UnsupportedError(f"model: {why}; use the model's own generate")
    steps, before = _Steps(model, own, length, compiled, on_first_step, on_failure), vars(model).get("forward")

    @functools.wraps(own)
    def forward(*arguments: Any, **options: Any) -> Any:
        return steps.forward(*arguments, **options)

    forward.replaced = own  # type: ignore[attr-defined]
    model.forward = forward
    try:
        yield
    finally:
        if before is None:
            del model.forward
        else:
            model.forward = before
