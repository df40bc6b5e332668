"""The key-value cache of the decode loop: rows of unequal length that come and go.

Every row starts at column 0 and has a length of its own, so a new row fits in beside old ones without moving them, and
attention over a row adds up in the same order whatever else is there. Finished rows are replaced by the last ones.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

_COLUMNS = 64
"""Room grows in steps of so many columns, at least by half."""


class KVRows(Cache):
    """Keys and values of `n` rows, `lengths` of which are filled.

    A model that is called with it at query length 1 writes one column per row, at the row's length, and sees all rows up
    to the longest; the caller masks what lies beyond a row's own length. `columns_last`: keys lie in memory with the
    columns as their last axis (their shape is the same), as `umad.engines.attention` likes them.
    """

    def __init__(self, layers: int, max_rows: int, columns_last: bool = False) -> None:
        super().__init__(layers=[_Rows(self) for _ in range(layers)])
        self.columns_last = columns_last
        self.max_rows = max_rows
        self.n = 0
        self.width = 0
        self.columns: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None

    def begin_step(self, lengths: torch.Tensor, width: int, even: bool) -> None:
        """Prepares one token per row. lengths: int64 [n] on the device; width: columns in use after the step."""
        self.width = width
        self.columns = None if even else lengths
        if self.columns is not None and (self.rows is None or len(self.rows) != self.n):
            self.rows = torch.arange(self.n, device=lengths.device)
        for layer in self._filled():
            layer.reserve(self.n, width)

    def append(self, prefix: Cache | None, sources: torch.Tensor | None, count: int, width: int) -> None:
        """Adds `count` rows from the first `width` columns of a prefilled cache: row i from its row `sources[i]`."""
        if prefix is not None:
            for layer, new in zip(self._layers(), prefix.layers, strict=True):
                layer.fill(self.n, count, new.keys, new.values, sources, width)
        self.n += count

    def replace(self, holes: torch.Tensor, movers: torch.Tensor, n: int, width: int) -> None:
        """Leaves `n` rows: those at `movers` take the places `holes` of finished ones."""
        if len(holes):
            for layer in self._filled():
                layer.keys[holes, :, :width] = layer.keys[movers, :, :width]
                layer.values[holes, :, :width] = layer.values[movers, :, :width]
        self.n = n

    def scrub(self, rows: torch.Tensor) -> None:
        """Zeroes rows that hold numbers that are not finite, since those would reach the place's next row even through a
        mask (0 times infinity)."""
        for layer in self._filled():
            layer.keys[rows] = 0
            layer.values[rows] = 0

    def clear(self) -> None:
        """Forgets all rows and gives the memory back."""
        self.n = self.width = 0
        self.rows = self.columns = None
        for layer in self._layers():
            layer.reset()

    def _layers(self) -> list[_Rows]:
        return self.layers

    def _filled(self) -> list[_Rows]:
        return [layer for layer in self._layers() if layer.is_initialized]


class _Rows(DynamicLayer):
    """One layer: `keys` and `values` [rows, heads, columns, size], of which the first `n` rows and `width` columns count."""

    def __init__(self, cache: KVRows) -> None:
        super().__init__()
        self.cache = cache

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.cache
        n, width = cache.n, cache.width
        if not self.is_initialized:
            self._allocate(n, width, key_states, value_states)
        if cache.columns is None:
            self.keys[:n, :, width - 1] = key_states[:, :, 0]
            self.values[:n, :, width - 1] = value_states[:, :, 0]
        else:
            self.keys[cache.rows, :, cache.columns] = key_states[:, :, 0]
            self.values[cache.rows, :, cache.columns] = value_states[:, :, 0]
        return self.keys[:n, :, :width], self.values[:n, :, :width]

    def get_seq_length(self) -> int:
        return max(self.cache.width - 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.width - 1 + query_length, 0

    def fill(
        self, at: int, count: int, keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor | None, width: int
    ) -> None:
        if not self.is_initialized:
            self._allocate(at + count, width + _COLUMNS, keys, values)
        self.reserve(at + count, width + 1)
        self.keys[at : at + count, :, :width] = keys if sources is None else keys[sources]
        self.values[at : at + count, :, :width] = values if sources is None else values[sources]

    def reserve(self, rows: int, columns: int) -> None:
        have_rows, have_columns = self.keys.shape[0], self.keys.shape[2]
        if rows <= have_rows and columns <= have_columns:
            return
        if rows > have_rows:
            rows = min(max(rows, 2 * have_rows), self.cache.max_rows)
        if columns > have_columns:
            columns = max(columns, have_columns + have_columns // 2)
        old_keys, old_values = self.keys, self.values
        self._allocate(max(rows, have_rows), max(columns, have_columns), old_keys, old_values)
        self.keys[:have_rows, :, :have_columns] = old_keys
        self.values[:have_rows, :, :have_columns] = old_values

    def _allocate(self, rows: int, columns: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        columns = -(-columns // _COLUMNS) * _COLUMNS
        # zeros, since a masked column still takes part in the arithmetic: 0 times whatever stands there
        _, heads, _, size = keys.shape
        if self.cache.columns_last:
            self.keys = keys.new_zeros((rows, heads, size, columns)).transpose(-1, -2)
        else:
            self.keys = keys.new_zeros((rows, heads, columns, size))
        self.values = values.new_zeros((rows, values.shape[1], columns, values.shape[3]))
        self.is_initialized = True

    def reset(self) -> None:
        self.keys = self.values = None  # type: ignore[assignment]
        self.is_initialized = False
