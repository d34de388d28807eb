"""What a forward pass costs."""

from vit_keras.spec import Stem, ViTSpec

NORM = 5  # multiply-adds per element of a norm with scale and bias, fvcore's figure


def flops(spec: ViTSpec) -> int:
    """Floating-point operations of one image's forward pass: 2 x multiply-adds; ViT-B/16 at 224 pixels has 35.2e9.

    Counted as fvcore does, and so as timm's tables: matrix products and convolutions, and 5 per element of a norm;
    activations, softmax and additions are left out.

    Args:
        spec: of the model, at its image size (or native size).
    """
    rows, columns = spec.grid
    patches, width = rows * columns, spec.width
    tokens = patches + spec.prefix_tokens
    ph, pw = spec.patch_size
    channels = spec.stem.channels if spec.stem else spec.in_channels
    size = spec.image_size or spec.native_size
    assert size is not None

    total = _stem(spec.stem, size, spec.in_channels) if spec.stem else 0
    total += patches * ph * pw * channels * width
    norms = NORM * tokens * width
    projections = 4 * tokens * width**2  # query, key, value, out
    attention = 2 * tokens**2 * width  # scores, weighted sum
    mlp = 2 * tokens * width * spec.mlp_dim
    total += spec.depth * (projections + attention + mlp + 2 * norms) + norms
    if spec.position == "relative":
        total += spec.depth * patches * (2 * patches - 1) * width
    outputs = tokens if spec.pooling is None else 1
    if spec.pooling == "map":
        total += 2 * width**2 * (tokens + 1) + 2 * tokens * width + 2 * width * spec.mlp_dim + NORM * width
    if spec.representation_size:
        total += outputs * width * spec.representation_size
    if spec.include_top:
        total += outputs * (spec.representation_size or width) * spec.classes
    return 2 * total


def _stem(stem: Stem, size: tuple[int, int], channels: int) -> int:
    """Multiply-adds of the ResNet stem."""

    def halved(pair):
        return tuple(-(-length // 2) for length in pair)

    size = halved(size)
    total = size[0] * size[1] * stem.width * (49 * channels + NORM)
    size, channels = halved(size), stem.width
    for block, units in enumerate(stem.layers):
        filters = stem.width * 2**block
        for unit in range(units):
            strided = block > 0 and unit == 0
            before, size = size[0] * size[1], halved(size) if strided else size
            after = size[0] * size[1]
            total += before * filters * (channels + NORM)
            total += after * filters * (9 * filters + NORM)
            total += after * 4 * filters * (filters + NORM)
            if unit == 0:
                total += after * 4 * filters * (channels + NORM)  # the projection
            channels = 4 * filters
    return total
