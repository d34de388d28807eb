"""One file a foreign format: its table of rules, its numerics, how it is recognised."""

from vit_keras.checkpoints.format import Format
from vit_keras.checkpoints.maps import huggingface, jax, keras_hub, timm, vit_keras_legacy

FORMATS: tuple[Format, ...] = (
    jax.FORMAT,
    timm.FORMAT,
    huggingface.VIT,
    huggingface.DINOV2_REGISTERS,
    huggingface.DINOV2,
    keras_hub.FORMAT,
    vit_keras_legacy.FORMAT,
)
