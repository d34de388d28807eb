"""The original JAX code's checkpoints: google-research/vision_transformer and big_vision, ViT and hybrids.

Keys are those the current code saves; `eras` brings the older and newer layouts to them.
"""

from vit_keras.checkpoints.eras import POSITIONS_KEY
from vit_keras.checkpoints.rules import Rule
from vit_keras.checkpoints.transforms import FIRST_KERNEL, POSITIONS, SAME, SPLIT_FIRST, SPLIT_LAST, Transform
from vit_keras.records import ALIGN_CORNERS

NAME = "original"
GELU = "tanh"  # flax's nn.gelu is the approximation unless told otherwise
EPSILON = 1e-6
RESIZE = ALIGN_CORNERS


def norm(source: str, target: str) -> tuple[Rule, Rule]:
    return Rule(f"{source}/scale", f"{target}/gamma"), Rule(f"{source}/bias", f"{target}/beta")


def dense(source: str, target: str, kernel: Transform = SAME, bias: Transform = SAME) -> tuple[Rule, Rule]:
    return Rule(f"{source}/kernel", f"{target}/kernel", kernel), Rule(f"{source}/bias", f"{target}/bias", bias)


def attention_and_mlp(source: str, target: str) -> tuple[Rule, ...]:
    attention = "MultiHeadDotProductAttention_0"
    return (
        *(
            rule
            for name in ("query", "key", "value")
            for rule in dense(f"{source}/{attention}/{name}", f"{target}/{attention}/{name}", SPLIT_LAST, SPLIT_LAST)
        ),
        *dense(f"{source}/{attention}/out", f"{target}/{attention}/out", SPLIT_FIRST),
        *dense(f"{source}/MlpBlock_0/Dense_0", f"{target}/MlpBlock_0/Dense_0"),
        *dense(f"{source}/MlpBlock_0/Dense_1", f"{target}/MlpBlock_0/Dense_1"),
    )


def convolution(source: str, target: str, index: str) -> tuple[Rule, ...]:
    kernel = Rule(f"{source}/conv{index}/kernel", f"{target}/conv{index}/kernel")
    return kernel, *norm(f"{source}/gn{index}", f"{target}/gn{index}")


BLOCK = ("Transformer/encoderblock_{i}", "Transformer_encoderblock_{i}")
UNIT = ("block{b}/unit{u}", "block{b}_unit{u}")

RULES = (
    Rule("conv_root/kernel", "conv_root/kernel", FIRST_KERNEL),
    *norm("gn_root", "gn_root"),
    *convolution(*UNIT, "1"),
    *convolution(*UNIT, "2"),
    *convolution(*UNIT, "3"),
    *convolution(*UNIT, "_proj"),
    *dense("embedding", "embedding", FIRST_KERNEL),
    Rule("cls", "class_token/cls"),
    Rule(POSITIONS_KEY, "Transformer_posembed_input/pos_embedding", POSITIONS),
    *norm(f"{BLOCK[0]}/LayerNorm_0", f"{BLOCK[1]}/LayerNorm_0"),
    *norm(f"{BLOCK[0]}/LayerNorm_1", f"{BLOCK[1]}/LayerNorm_1"),
    *attention_and_mlp(*BLOCK),
    *norm("Transformer/encoder_norm", "Transformer_encoder_norm"),
    Rule("MAPHead_0/probe", "MAPHead_0/probe"),
    *norm("MAPHead_0/LayerNorm_0", "MAPHead_0/LayerNorm_0"),
    *attention_and_mlp("MAPHead_0", "MAPHead_0"),
    *dense("pre_logits", "pre_logits"),
    *dense("head", "head"),
)
