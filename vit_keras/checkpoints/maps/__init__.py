"""One file a foreign format: its table of rules, its numerics, how it is recognised."""

from vit_keras.checkpoints.format import Format
from vit_keras.checkpoints.maps import huggingface, jax, keras_hub, timm, vit_keras_legacy

FORMATS: tuple[Format, ...] = (
    vit_keras_legacy.FORMAT,  # before the original, whose names it has inside its own
    jax.FORMAT,
    timm.FORMAT,
    huggingface.VIT,
    huggingface.DINOV2_REGISTERS,
    huggingface.DINOV2,
    keras_hub.FORMAT,
)
