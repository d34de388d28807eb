"""The peers' side of the tests, run in a process of its own: PyTorch and TensorFlow crash each other in one.

    python -m tests.peers make LIBRARY CASE FOLDER     a model with random weights, saved as the library saves models,
                                                       with images and its outputs beside it (`io.npz`)
    python -m tests.peers run LIBRARY FOLDER IO OUT    what the library computes with a folder of ours, on images of IO
    python -m tests.peers golden LIBRARY FOLDER        the small files under tests/golden/peers; their images are
                                                       `images_of` of this file

LIBRARY is timm (1.0.31), transformers (5.24), keras_hub (0.32), or vit_keras (the old package, 0.2.0 and 0.1.2, which
bears our import name: run this file itself, from a folder that is not the checkout, with the package on PYTHONPATH).
"""

import json
import sys
from pathlib import Path

import numpy as np

TINY = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 4,
    "mlp_ratio": 1.5,
    "num_classes": 5,
}
TIMM = {
    "plain": {},
    "gap": {"global_pool": "avg"},
    "gap_without_class_token": {"global_pool": "avg", "class_token": False, "fc_norm": False},
    "distilled": {"distilled": True},
    "registers": {"reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5},
    "dinov2": {"init_values": 1e-5},
    "no_qkv_bias": {"qkv_bias": False},
    "tanh": {"act_layer": "gelu_tanh"},
    "class_token_without_position": {"no_embed_class": True},
    "map": {"global_pool": "map", "class_token": False},
    "rectangle": {"img_size": (48, 32)},
    "hybrid": {"stem": (1,)},
    "hybrid_stem": {"stem": ()},
}
# Names of timm's models → what of them is not the library's own preset.
TIMM_FULL = {
    "vit_small_patch32_224": {},
    "vit_base_patch16_224": {},
    "vit_large_patch16_224": {},
    "vit_base_r50_s16_224": {},
    "vit_small_r26_s32_224": {},
}
CONFIG = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
VIT, DINOV2 = {**CONFIG, "intermediate_size": 36}, {**CONFIG, "mlp_ratio": 2}
LABELS = {"num_labels": 5}
HUGGING_FACE = {
    "vit": ("ViTForImageClassification", {**VIT, **LABELS}),
    "vit_model": ("ViTModel", VIT),
    "vit_tanh": (
        "ViTForImageClassification",
        {**VIT, **LABELS, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3},
    ),
    "vit_no_qkv_bias": ("ViTForImageClassification", {**VIT, **LABELS, "qkv_bias": False}),
    "deit": ("DeiTForImageClassification", {**VIT, **LABELS}),
    "deit_with_teacher": ("DeiTForImageClassificationWithTeacher", {**VIT, **LABELS}),
    "dinov2": ("Dinov2Model", DINOV2),
    "dinov2_head": ("Dinov2ForImageClassification", {**DINOV2, **LABELS}),
    "dinov2_registers": ("Dinov2WithRegistersModel", DINOV2),
    "dinov2_registers_head": ("Dinov2WithRegistersForImageClassification", {**DINOV2, **LABELS}),
}
HUGGING_FACE_FULL = {
    "ViTForImageClassification": ("ViTForImageClassification", {}),
    "Dinov2Model": ("Dinov2Model", {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518, "patch_size": 14}),
}


def randomise(model, seed):
    """Random weights of the sizes that training gives; nothing is zero, one, or equal to its neighbour."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2 and not any(part in name for part in ("token", "pos", "latent")):
                parameter.copy_(noise * 1.3 / parameter[0].numel() ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif "gamma" in name or "lambda" in name:
                parameter.copy_(0.5 + 0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)
            # What survives 16 bits makes small golden files.
            parameter.copy_(parameter.half().float())
    return model.eval()


def run_torch(model, images, **options):
    """Logits, or the tokens of a model without a head, of NHWC images."""
    import torch

    with torch.no_grad():
        outputs = model(torch.tensor(images.transpose(0, 3, 1, 2)), **options)
    for name in ("logits", "last_hidden_state"):
        if hasattr(outputs, name):
            return outputs[name].numpy()
    return outputs.numpy()


def timm_model(case):
    import timm
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    if case in TIMM_FULL:
        return timm.create_model(case, pretrained=False)
    arguments = {**TINY, **TIMM[case]}
    if "stem" in arguments:
        arguments |= timm_stem(arguments.pop("stem"))
    kind = VisionTransformerDistilled if arguments.pop("distilled", False) else VisionTransformer
    return kind(**arguments)


def timm_stem(layers):
    """A stem half as wide as those of timm's own hybrids, with their numerics."""
    from functools import partial

    from timm.layers import StdConv2dSame
    from timm.models.resnetv2 import ResNetV2, create_resnetv2_stem
    from timm.models.vision_transformer_hybrid import HybridEmbed

    same = {"preact": False, "stem_type": "same", "conv_layer": partial(StdConv2dSame, eps=1e-8)}
    if layers:
        channels = tuple(128 * 2**stage for stage in range(len(layers)))
        backbone = ResNetV2(layers, channels=channels, num_classes=0, global_pool="", stem_chs=32, **same)
        return {"embed_layer": partial(HybridEmbed, backbone=backbone), "patch_size": 1}
    return {"embed_layer": partial(HybridEmbed, backbone=create_resnetv2_stem(3, 32, **same)), "patch_size": 8}


def make_timm(case, folder):
    from safetensors.torch import save_file

    model = randomise(timm_model(case), seed=len(case))
    size = model.patch_embed.img_size
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")
    return model, size


def make_transformers(case, folder):
    import transformers

    name, config = {**HUGGING_FACE, **HUGGING_FACE_FULL}[case]
    kind = getattr(transformers, name)
    model = randomise(kind(kind.config_class(**config)), seed=len(case))
    model.save_pretrained(folder)
    size = 224 if config.get("image_size") == 518 else model.config.image_size  # positions resized by the library
    return model, (size, size)


def make(library, case, folder):
    folder.mkdir(parents=True, exist_ok=True)
    model, size = {"timm": make_timm, "transformers": make_transformers}[library](case, folder)
    images = np.random.default_rng(0).normal(size=(2, *size, 3)).astype("float32")
    np.savez(folder / "io.npz", images=images, outputs=run_torch(model, images))


def run(library, folder, io, out):
    images = np.load(io)["images"]
    if library == "timm":
        import timm

        model, missing = timm.create_model(f"local-dir:{folder}", pretrained=True), []
    else:
        import transformers

        kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
        model, information = kind.from_pretrained(folder, output_loading_info=True)
        missing = [key for keys in information.values() for key in keys]
    assert not missing, missing
    state = (
        {f"state/{key}": value.numpy() for key, value in model.state_dict().items()} if images.shape[1] <= 64 else {}
    )
    np.savez(out, outputs=run_torch(model.eval(), images), **state)


def images_of(size):
    """Images whose values survive 16 bits, so that golden files are small."""
    return np.random.default_rng(0).normal(size=(2, *size, 3)).astype("float16").astype("float32")


TALL = ("plain", "registers", "vit", "dinov2", "dinov2_registers")


def taller(model, case):
    """timm's model for images of 48x32 pixels, with the weights of `model` as timm itself resizes them."""
    from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

    other = VisionTransformer(**{**TINY, **TIMM[case], "img_size": (48, 32)}).eval()
    other.load_state_dict(checkpoint_filter_fn(model.state_dict(), other))
    return other


def golden_torch(library, folder):
    """`LIBRARY_CASE.npz`: `weights/KEY` as saved, `config`, `outputs`, and for some cases those of 48x32 pixels."""
    from safetensors.numpy import load_file

    cases = {"timm": TIMM, "transformers": HUGGING_FACE}[library]
    for case in cases:
        import tempfile

        with tempfile.TemporaryDirectory() as saved:
            model, size = {"timm": make_timm, "transformers": make_transformers}[library](case, Path(saved))
            arrays = load_file(Path(saved, "model.safetensors"))
            config = Path(saved, "config.json")
            content = {"config": np.array(config.read_text())} if config.exists() else {}
        images = images_of(size)
        content["outputs"] = run_torch(model, images)
        if case in TALL:
            tall = images_of((48, 32))
            more = {"interpolate_pos_encoding": True} if case == "vit" else {}
            outputs = run_torch(taller(model, case) if library == "timm" else model, tall, **more)
            content["tall_outputs"] = outputs
        if case == "hybrid":  # so weak that a wrong epsilon of GroupNorm shows
            content["faint_outputs"] = run_torch(model, images / 256)
        content |= {f"weights/{key}": array for key, array in arrays.items()}
        np.savez_compressed(folder / f"{library}_{case}.npz", **content)


def golden_keras_hub(folder):
    """`keras_hub_CASE/`, a preset folder as the library saves it, with `io.npz` in it."""
    import keras
    import keras_hub

    for case, arguments in (("token", {"intermediate_dim": 24}), ("gap", {"pooling": "gap"})):
        keras.utils.set_random_seed(1)
        backbone = keras_hub.models.ViTBackbone(
            image_shape=(32, 32, 3),
            patch_size=8,
            num_layers=2 if case == "token" else 1,
            num_heads=4,
            hidden_dim=16,
            mlp_dim=24,
            use_class_token=case == "token",
            layer_norm_epsilon=1e-5,
        )
        model = keras_hub.models.ViTImageClassifier(backbone=backbone, num_classes=5, **arguments)
        randomise_keras(model)
        target = folder / f"keras_hub_{case}"
        model.save_to_preset(str(target))
        np.savez_compressed(target / "io.npz", outputs=np.asarray(model(images_of((32, 32)))))


def randomise_keras(model):
    rng = np.random.default_rng(0)
    for variable in model.weights:
        noise = 0.3 * rng.normal(size=variable.shape)
        variable.assign((noise + ("gamma" in variable.path)).astype("float16"))


def golden_vit_keras(folder):
    """`vit_keras_CASE.{weights.h5,h5,npz}` of the old package; of 0.1, which needs Keras 2, `vit_keras_01.{h5,npz}`."""
    import tensorflow as tf

    from vit_keras import vit

    if tf.__version__ < "2.16":
        size = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_heads": 4, "mlp_dim": 24, "classes": 5}
        model = vit.build_model(**size, name="tiny", num_layers=2, representation_size=24)
        rng = np.random.default_rng(0)
        for variable in model.weights:
            noise = 0.3 * rng.normal(size=variable.shape)
            variable.assign((noise + ("gamma" in variable.name)).astype("float16").astype("float32"))
        model.save_weights(str(folder / "vit_keras_01.h5"))
        np.savez_compressed(folder / "vit_keras_01.npz", outputs=np.asarray(model(images_of((32, 32)))))
        return

    for case, arguments in (("plain", {}), ("pre_logits", {"representation_size": 24})):
        size = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_heads": 4, "mlp_dim": 24, "classes": 5}
        model = vit.build_model(**size, name="tiny", num_layers=1 if arguments else 2, **arguments)
        randomise_keras(model)
        for suffix in ("weights.h5", "h5") if case == "plain" else ("weights.h5",):
            path = str(folder / f"vit_keras_{case}.{suffix}")
            model.save_weights(path) if suffix == "weights.h5" else model.save(path)
        np.savez_compressed(folder / f"vit_keras_{case}.npz", outputs=np.asarray(model(images_of((32, 32)))))


def main():
    command, *arguments = sys.argv[1:]
    if command == "make":
        make(arguments[0], arguments[1], Path(arguments[2]))
    elif command == "run":
        run(arguments[0], *map(Path, arguments[1:]))
    elif command == "golden":
        library, folder = arguments[0], Path(arguments[1])
        folder.mkdir(parents=True, exist_ok=True)
        other = {"keras_hub": golden_keras_hub, "vit_keras": golden_vit_keras}
        other[library](folder) if library in other else golden_torch(library, folder)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
