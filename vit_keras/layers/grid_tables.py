"""Tables of positions that know their grid: saved with it, resized when they are loaded at another."""

import warnings

import keras
import numpy as np
from keras import ops

from vit_keras.checks import as_int, as_pair
from vit_keras.layers.interpolation import resize_table, square_grid
from vit_keras.records import Resize


class GridTables(keras.layers.Layer):
    """Base of the layers whose weights are tables on the grid of patches.

    Their grid is saved beside the weights; weights saved at another grid are resized when they are loaded.

    Args:
        grid: (height, width) in patches of the stored tables; None (default) takes it from the first input.
        prefix_tokens: tokens before the patch tokens.
        resize: rule for other grids, a `vit_keras.records.Resize`, its method's name or its dict.
    """

    def __init__(self, grid=None, prefix_tokens=0, resize="align_corners", **kwargs):
        super().__init__(**kwargs)
        self.grid = None if grid is None else as_pair(grid, "grid")
        self.prefix_tokens = None if prefix_tokens is None else as_int(prefix_tokens, "prefix_tokens", minimum=0)
        self.resize = resize

    @property
    def resize(self) -> Resize:
        return self._resize

    @resize.setter
    def resize(self, rule):
        # A Resize is a named value, not state: object.__setattr__ keeps Keras from tracking it.
        object.__setattr__(self, "_resize", Resize.of(rule))

    def table_grid(self, name, grid):
        """(rows, columns) of the table called `name` when the patches lie on `grid`, and its rows without a place."""
        raise NotImplementedError

    def resized(self, variable, grid):
        """The table `variable` (rows, D) at another grid, inside the graph."""
        (old, prefix), (new, _) = (self.table_grid(variable.name, g) for g in (self.grid, grid))
        return resize_table(ops.reshape(variable, (-1, variable.shape[-1])), old, new, self.resize, prefix, ops)

    def fit_table(self, name, value, source_grid, prefix=None):
        """An array (rows, D) stored at `source_grid`, resized to this layer's grid with NumPy."""
        old, own_prefix = self.table_grid(name, source_grid)
        new, _ = self.table_grid(name, self.grid)
        return resize_table(value, old, new, self.resize, own_prefix if prefix is None else prefix)

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if self.weights:
            store["grid"] = np.asarray(self.grid)

    def load_own_variables(self, store):
        if not self.weights:
            return
        tables = [key for key in store.keys() if key != "grid"]  # noqa: SIM118  (an HDF5 group in disguise)
        values = [np.asarray(store[key]) for key in sorted(tables)]
        fits = len(values) == len(self.weights) and all(
            value.ndim == len(variable.shape) and value.shape[-1] == variable.shape[-1]
            for value, variable in zip(values, self.weights)
        )
        source = self._stored_grid(store, values) if fits else None
        if source is None or not self._holds(values, source):
            raise ValueError(
                f"Layer {self.name!r} expected position tables of shape {[tuple(v.shape) for v in self.weights]} or of "
                f"another grid. Received: {[value.shape for value in values]} with grid {source}. Position kind, width "
                "and prefix tokens of the model must be those of the file."
            )
        if source != self.grid:
            warnings.warn(
                f"Layer {self.name!r}: resizing position embeddings from {source} to {self.grid} (rows, columns).",
                stacklevel=2,
            )
            values = [self._refit(variable, value, source) for variable, value in zip(self.weights, values)]
        for variable, value in zip(self.weights, values):
            variable.assign(value)

    def _holds(self, values, source):
        """Whether each table has as many rows as it must have at the source's grid."""
        for variable, value in zip(self.weights, values):
            (rows, columns), prefix = self.table_grid(variable.name, source)
            if value.reshape(-1, value.shape[-1]).shape[0] != prefix + rows * columns:
                return False
        return True

    def _stored_grid(self, store, values):
        if "grid" in store.keys():  # noqa: SIM118  (an HDF5 group in disguise)
            return tuple(int(length) for length in np.asarray(store["grid"]))
        # Files of other writers (the old vit-keras package) hold no grid.
        if values[0].shape == tuple(self.weights[0].shape):
            return self.grid
        grid = square_grid(values[0].reshape(-1, values[0].shape[-1]).shape[0] - (self.prefix_tokens or 0))
        if grid is None:
            raise ValueError(
                f"Layer {self.name!r}: the file holds a position table of shape {values[0].shape} without its grid, "
                f"and it is not square. The model's grid is {self.grid}."
            )
        return grid

    def _refit(self, variable, value, source):
        width = variable.shape[-1]
        return self.fit_table(variable.name, value.reshape(-1, width), source).reshape(variable.shape)

    def get_config(self):
        config = {
            "grid": self.grid and list(self.grid),
            "prefix_tokens": self.prefix_tokens,
            "resize": self.resize.to_dict(),
        }
        return {**super().get_config(), **config}
