"""Rules that the formats of PyTorch share: names of its layers, orders of its axes."""

from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import SAME, TRANSPOSED, Transform, part

BLOCK = "Transformer_encoderblock_{i}"


def linear(source: str, target: str, kernel: Transform = TRANSPOSED) -> tuple[Rule, Rule]:
    return Rule(f"{source}.weight", f"{target}/kernel", kernel), Rule(f"{source}.bias", f"{target}/bias")


def joined(source: str, targets: tuple[str, ...]) -> tuple[Rule, ...]:
    """Linear layers that PyTorch code joins into one, such as `qkv`."""
    count = len(targets)
    return tuple(
        rule
        for index, target in enumerate(targets)
        for rule in (
            Rule(f"{source}.weight", f"{target}/kernel", part(TRANSPOSED, index, count)),
            Rule(f"{source}.bias", f"{target}/bias", part(SAME, index, count)),
        )
    )


def norm(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}.weight", f"{target}/gamma"), Rule(f"{source}.bias", f"{target}/beta")
