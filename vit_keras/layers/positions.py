"""Where a token stands: tables added to the tokens, and biases added to the attention scores."""

import math

import keras
import numpy as np
from keras import ops

from vit_keras.checks import as_choice
from vit_keras.layers.grid_tables import GridTables
from vit_keras.layers.interpolation import square_grid
from vit_keras.spec import RELATIVE_POSITIONS, TABLE_POSITIONS


@keras.saving.register_keras_serializable("vit_keras")
class AddPositionEmbs(GridTables):
    """Adds position embeddings to tokens: (B, N, D) -> (B, N, D).

    ```python
    AddPositionEmbs()(tokens)                   # a square grid, with or without a class token in front
    AddPositionEmbs(grid=(4, 6))(tokens)        # any other
    AddPositionEmbs(grid=(14, 14))(tokens, patches=patches)   # any size: the grid of `patches` (B, h, w, D) rules
    ```

    Args:
        kind: `"learned_1d"` (default), one row a token, prefix tokens included; `"learned_2d"`, a table of rows and
            one of columns, D/2 wide each and concatenated; `"sincos_2d"`, fixed sines and cosines.
            Prefix tokens get no position under the 2-D kinds.
        grid: (height, width) in patches of the stored table. None (default) takes that of `patches`, or the square
            that fits the number of tokens.
        prefix_tokens: tokens in `inputs` before the patch tokens. None (default): 0 or 1, whichever leaves a square.
        resize: rule for other grids than the stored one. Default `"align_corners"`, the original code's.

    Call arguments:
        inputs: (B, N, D).
        patches: optional map (B, h, w, ...) whose height and width are the grid of this input.

    Raises:
        ValueError: no grid is given and the number of tokens fits no square; or tokens and grid do not agree.

    Reference: Dosovitskiy et al. 2021, section 3.1 and appendix D.4; big_vision `models/vit.py`,
        `posemb_sincos_2d`, temperature 10,000.
    """

    def __init__(self, kind="learned_1d", grid=None, prefix_tokens=None, resize="align_corners", **kwargs):
        super().__init__(grid=grid, prefix_tokens=prefix_tokens, resize=resize, **kwargs)
        self.kind = as_choice(kind, "kind", TABLE_POSITIONS)

    def build(self, inputs_shape, patches_shape=None):
        self._settle_grid(inputs_shape[1], patches_shape)
        rows, columns = self.grid
        width = inputs_shape[-1]
        divisor = {"learned_1d": 1, "learned_2d": 2, "sincos_2d": 4}[self.kind]
        if width % divisor:
            raise ValueError(f"Positions of kind {self.kind!r} need a width divisible by {divisor}. Received: {width}")
        if self.kind == "learned_1d":
            self.pos_embedding = self._table((1, self.prefix_tokens + rows * columns, width), "pos_embedding")
        elif self.kind == "learned_2d":
            self.row_embedding = self._table((rows, width // 2), "row_embedding")
            self.column_embedding = self._table((columns, width // 2), "column_embedding")

    def _table(self, shape, name):
        # autocast=False: interpolation in the graph starts from the float32 values.
        initializer = keras.initializers.RandomNormal(stddev=0.02)
        return self.add_weight(shape=shape, initializer=initializer, name=name, autocast=False)

    def _settle_grid(self, tokens, patches_shape):
        if self.grid is None and patches_shape is not None and None not in patches_shape[1:3]:
            self.grid = tuple(patches_shape[1:3])
        if tokens is None:
            if self.grid is None:
                raise ValueError("AddPositionEmbs needs `grid=(height, width)` when the number of tokens is unknown.")
            self.prefix_tokens = self.prefix_tokens or 0
            return
        prefixes = (0, 1) if self.prefix_tokens is None else (self.prefix_tokens,)
        for prefix in prefixes:
            grid = self.grid or square_grid(tokens - prefix)
            if grid and prefix + grid[0] * grid[1] == tokens:
                self.grid, self.prefix_tokens = grid, prefix
                return
        raise ValueError(
            f"AddPositionEmbs received {tokens} tokens, which do not fit grid={self.grid} with "
            f"prefix_tokens={self.prefix_tokens}. Pass grid=(height, width) in patches and prefix_tokens."
        )

    def table_grid(self, name, grid):
        rows, columns = grid
        if name == "pos_embedding":
            return (rows, columns), self.prefix_tokens
        return ((rows, 1) if name == "row_embedding" else (columns, 1)), 0

    def call(self, inputs, patches=None):
        grid = self.grid if patches is None else tuple(ops.shape(patches)[1:3])
        table = getattr(self, f"_{self.kind}")(grid, inputs.shape[-1])  # (N, D), or (h * w, D) for the 2-D kinds
        if self.kind != "learned_1d" and self.prefix_tokens:
            table = ops.pad(table, ((self.prefix_tokens, 0), (0, 0)))
        return ops.add(inputs, ops.cast(table, inputs.dtype)[None])

    def _learned_1d(self, grid, width):
        return self.resized(self.pos_embedding, grid)

    def _learned_2d(self, grid, width):
        rows = self.resized(self.row_embedding, grid)[:, None]
        columns = self.resized(self.column_embedding, grid)[None]
        shape = (ops.shape(rows)[0], ops.shape(columns)[1], width // 2)
        both = [ops.broadcast_to(rows, shape), ops.broadcast_to(columns, shape)]
        return ops.reshape(ops.concatenate(both, axis=-1), (-1, width))

    def _sincos_2d(self, grid, width):
        quarter = width // 4
        omega = 10_000.0 ** (-np.arange(quarter) / max(quarter - 1, 1))
        omega = ops.convert_to_tensor(omega.astype("float32"))
        y, x = (ops.arange(length, dtype="float32")[:, None] * omega for length in grid)
        shape = (grid[0], grid[1], quarter)
        x, y = ops.broadcast_to(x[None], shape), ops.broadcast_to(y[:, None], shape)
        table = ops.concatenate([ops.sin(x), ops.cos(x), ops.sin(y), ops.cos(y)], axis=-1)
        return ops.reshape(table, (-1, width))

    def compute_output_shape(self, inputs_shape, patches_shape=None):
        return inputs_shape

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@keras.saving.register_keras_serializable("vit_keras")
class RelativePositions(GridTables):
    """Learned biases for attention scores, from where query and key stand to each other.

    Args:
        kind: `"relative"`, the paper's: each offset in the row-major order of patches has an embedding that acts as a
            key, dotted with the query; `"relative_bias"`: a scalar a head for each 2-D offset.
        grid: (height, width) in patches.
        prefix_tokens: tokens before the patch tokens; scores from and to them get no bias. Default 0.
        resize: rule for other grids than the stored one.

    Call arguments:
        query: (B, A, N, d), scaled as for the content scores.
        patches: optional map (B, h, w, ...) whose height and width are the grid of this input.

    Returns: what to add to the scores (B, A, N, N): of that shape, or (1, A, N, N).

    Reference: `relative`: Dosovitskiy et al. 2021, appendix D.4; `relative_bias`: Liu et al. 2021 (Swin), section
        3.2, and Bao et al. 2022 (BEiT), section 2.4.
    """

    def __init__(self, kind="relative_bias", grid=None, prefix_tokens=0, resize="align_corners", **kwargs):
        super().__init__(grid=grid, prefix_tokens=prefix_tokens, resize=resize, **kwargs)
        self.kind = as_choice(kind, "kind", RELATIVE_POSITIONS)

    def build(self, query_shape, patches_shape=None):
        _, heads, tokens, head_dim = query_shape
        if self.grid is None:
            static = patches_shape is not None and None not in patches_shape[1:3]
            self.grid = tuple(patches_shape[1:3]) if static else square_grid((tokens or 0) - self.prefix_tokens)
        if self.grid is None or (tokens and math.prod(self.grid) + self.prefix_tokens != tokens):
            raise ValueError(
                f"Relative positions received {tokens} tokens, which do not fit grid={self.grid} with "
                f"prefix_tokens={self.prefix_tokens}. Pass grid=(height, width) in patches and prefix_tokens."
            )
        size = heads * head_dim if self.kind == "relative" else heads
        (rows, columns), _ = self.table_grid("offsets", self.grid)
        initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.offsets = self.add_weight(
            shape=(rows * columns, size), initializer=initializer, name="offsets", autocast=False
        )

    def table_grid(self, name, grid):
        rows, columns = grid
        return ((2 * rows * columns - 1, 1) if self.kind == "relative" else (2 * rows - 1, 2 * columns - 1)), 0

    def call(self, query, patches=None):
        grid = self.grid if patches is None else tuple(ops.shape(patches)[1:3])
        table = ops.cast(self.resized(self.offsets, grid), query.dtype)
        bias = self._dotted(query, table) if self.kind == "relative" else self._looked_up(table, grid)
        p = self.prefix_tokens
        return ops.pad(bias, ((0, 0), (0, 0), (p, 0), (p, 0))) if p else bias

    def _dotted(self, query, table):
        """Scores (B, A, n, n) of patch queries with the embedding of key place minus query place."""
        query = query[:, :, self.prefix_tokens :]
        _, heads, n, head_dim = ops.shape(query)
        keys = ops.transpose(ops.reshape(table, (-1, heads, head_dim)), (1, 2, 0))  # (A, d, 2n - 1)
        scores = ops.matmul(query, keys)  # (B, A, n, 2n - 1), by offset
        # From offsets to places: in the flattened rows, each made one longer, stepping by 2n - 1 shifts row i by i.
        scores = ops.pad(scores, ((0, 0), (0, 0), (0, 0), (0, 1)))
        scores = ops.reshape(scores, (-1, heads, 2 * n * n))[:, :, : n * (2 * n - 1)]
        return ops.reshape(scores, (-1, heads, n, 2 * n - 1))[:, :, :, n - 1 :]

    def _looked_up(self, table, grid):
        """Scores (1, A, n, n), a scalar a head for (query row - key row, query column - key column)."""
        rows, columns = (ops.arange(length, dtype="int32") for length in grid)
        rows = rows[:, None] - rows[None] + (grid[0] - 1)  # (h, h)
        columns = columns[:, None] - columns[None] + (grid[1] - 1)  # (w, w)
        index = rows[:, None, :, None] * (2 * grid[1] - 1) + columns[None, :, None, :]  # (h, w, h, w)
        n = grid[0] * grid[1]
        bias = ops.take(table, ops.reshape(index, (-1,)), axis=0)  # (n * n, A)
        return ops.reshape(ops.transpose(bias), (1, -1, n, n))

    def compute_output_shape(self, query_shape, patches_shape=None):
        batch = query_shape[0] if self.kind == "relative" else 1
        return (batch, query_shape[1], query_shape[2], query_shape[2])

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}
