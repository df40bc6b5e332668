"""How one model architecture is called: prefill, one step, and the check that both give what a full pass gives."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from umad.engines import attention
from umad.engines.kv import KVRows
from umad.records import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the engine has to know of a model's `forward`.

    `cache_argument`: the name under which it takes the cache, which differs between versions of transformers.
    `windows`: how many tokens a layer sees, by the name of its mask (None: all).
    """

    layers: int
    cache_argument: str
    windows: dict[str, int | None]
    additive: bool
    """Masks are added to the scores rather than boolean."""
    own_attention: bool
    """Decode steps go through `umad.engines.attention`."""

    @classmethod
    def of(cls, model: PreTrainedModel, max_context: int) -> Architecture:
        """Raises `UserError` for a model whose state is not an ordinary key-value cache."""
        name = type(model).__name__
        takes = inspect.signature(model.forward).parameters
        cache_argument = next((a for a in ("cache", "past_key_values") if a in takes), None)
        if cache_argument is None or "position_ids" not in takes or getattr(model, "_is_stateful", False):
            raise UserError(f"{name}: the transformers engine needs a model with a key-value cache and position ids")
        config = model.config.get_text_config(decoder=True)
        layers = DynamicCache(config=config).layers
        types = getattr(config, "layer_types", None) or []
        windows: dict[str, int | None] = {}
        for layer in layers:
            if type(layer) is DynamicSlidingWindowLayer:
                if layer.sliding_window < max_context:
                    windows["sliding_attention"] = layer.sliding_window
                else:
                    windows["full_attention"] = None
            elif type(layer) is DynamicLayer:
                windows["full_attention"] = None
            else:
                raise UserError(f"{name}: the transformers engine cannot keep the state of a {type(layer).__name__}")
        if "sliding_attention" in windows and "chunked_attention" in types:
            raise UserError(
                f"{name}: attention in chunks of {windows['sliding_attention']} tokens is not supported; set the "
                "longest prompt and response so that they fit into one"
            )
        own = attention.install(model)
        additive = own or model.config._attn_implementation == "eager"
        return cls(len(layers), cache_argument, windows, additive, own)

    def prefill(self, model: PreTrainedModel, ids: torch.Tensor) -> Cache:
        """Keys and values of prompts [U, P], padded on the right: causal attention never looks there, so no mask is
        needed. The head is not computed."""
        cache = Cache(layers=[DynamicLayer() for _ in range(self.layers)])
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        model.base_model(input_ids=ids, position_ids=positions, use_cache=True, **{self.cache_argument: cache})
        return cache

    def step(self, model: PreTrainedModel, kv: KVRows, pending: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        """Logits [n, V] after one token per row; pending, lengths: int64 [n]."""
        device = model.device
        width = int(lengths.max()) + 1
        even = int(lengths.min()) + 1 == width
        positions = torch.from_numpy(lengths).to(device)
        kv.begin_step(positions, width, even)
        return model(
            input_ids=torch.from_numpy(pending).to(device).unsqueeze(1),
            attention_mask=self._mask(positions, width, even, model.dtype),
            position_ids=positions.unsqueeze(1),
            use_cache=True,
            **{self.cache_argument: kv},
        ).logits[:, -1]

    def _mask(self, positions: torch.Tensor, width: int, even: bool, dtype: torch.dtype) -> Any:
        if even and list(self.windows) == ["full_attention"]:
            return None
        columns = torch.arange(width, device=positions.device)
        last = positions.unsqueeze(1)
        masks = {}
        for name, window in self.windows.items():
            seen = columns <= last
            if window is not None:
                seen &= columns > last - window
            mask = seen[:, None, None, :]
            if self.additive:
                mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                    ~mask, torch.finfo(dtype).min
                )
            masks[name] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    @torch.inference_mode()
    def verify(self, model: PreTrainedModel, kv: KVRows) -> None:
        """Compares a prefill and three steps of two rows of unequal length with full passes over each row.

        A model with an unusual forward (its own positions, its own masks, a hidden state) would generate nonsense in
        silence; here it is refused. Two of the rows' lengths are unequal, so masks and positions are in play.
        """
        vocabulary = int(model.get_input_embeddings().num_embeddings)
        rng = np.random.default_rng(0)
        rows = [rng.integers(vocabulary, size=size) for size in (5, 9)]
        wanted = torch.cat([model(input_ids=_tensor(row[None], model), use_cache=False).logits[0, -3:] for row in rows])
        if not torch.isfinite(wanted).all():
            raise UserError(f"{type(model).__name__}: the loaded weights give logits that are not finite")
        padded = np.zeros((2, 6), dtype=np.int64)
        for place, row in zip(padded, rows, strict=True):
            place[: len(row) - 3] = row[:-3]
        most = kv.max_rows
        try:
            kv.max_rows = max(most, 2)
            prefix = self.prefill(model, _tensor(padded, model))
            if any(layer.keys is None for layer in prefix.layers):
                raise UserError(f"{type(model).__name__}: the model does not fill the key-value cache that it is given")
            kv.append(prefix, None, 2, 6)
            got = []
            for back in (3, 2, 1):
                pending = np.array([row[-back] for row in rows])
                got.append(self.step(model, kv, pending, np.array([len(row) - back for row in rows])))
        finally:
            kv.clear()
            kv.max_rows = most
        difference = (torch.stack(got, 1).flatten(0, 1) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
        if difference > (1e-3 if model.dtype == torch.float32 else 0.1):
            raise UserError(
                f"{type(model).__name__}: the transformers engine does not know how to decode this model step by step "
                f"(its logits differ from a full pass by {float(difference):.2g} of their size)"
            )


def _tensor(ids: np.ndarray, model: PreTrainedModel) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(model.device)
