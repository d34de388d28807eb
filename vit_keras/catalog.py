"""One row per published set of trained weights, named `variant.tag`. Imports no Keras.

Sources of the facts: the listing of the buckets in google-research/vision_transformer, `vit_jax.ipynb`; its README
("AugReg" table: recommended pre-trainings, their sizes and fine-tuned accuracies); file names of further fine-tuned
AugReg weights: timm 1.0.31, `default_cfgs`. What none of them states is None.
"""

import dataclasses
import fnmatch
import re
from typing import Any

from vit_keras.records import ALIGN_CORNERS, HUGGING_FACE, IMAGENET_MEAN, ORIGINAL, TIMM, Preprocessing, Resize

BUCKET = "https://storage.googleapis.com/vit_models"
MIB = 2**20
VIT, AUGREG, SAM = "arXiv:2010.11929", "arXiv:2106.10270", "arXiv:2106.01548"
README = "vision_transformer README"
CLASSES = {
    "imagenet1k": 1000,
    "imagenet21k": 21843,
    "cifar10": 10,
    "cifar100": 100,
    "oxford_iiit_pet": 37,
    "resisc45": 45,
    "fashion_mnist": 10,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What is known of one published checkpoint; a fact that no source states is None.

    Args:
        variant: name of the architecture.
        tag: name of the weights among those of the variant.
        url: where it is published; a name without `://` is a file of this package.
        image_size: height and width of the images it was trained at, in pixels.
        labels: name of the label set, in the order of the head, see `vit_keras.labels`.
        head: `"real"`, `"zero"` (the original ImageNet-21k heads were not released), or None for no head.
        pre_logits: whether a tanh layer of the model's width stands before the head.
        size: of the file in bytes, as precisely as the source prints it.
        paper: that describes the training.
        accuracy, accuracy_source: top-1 on the validation (ImageNet) or test images in percent, and who reports it.
        license: of the weights.
        format: layout of the file.
        gelu, epsilon: numerics of the training code.
        resize: rule for position tables of other grids.
        preprocessing: what the weights expect of pixels.
    """

    variant: str
    tag: str
    url: str
    image_size: int
    labels: str | None
    head: str | None = "real"
    pre_logits: bool = False
    size: int | None = None
    paper: str = VIT
    accuracy: float | None = None
    accuracy_source: str | None = None
    license: str = "Apache-2.0"
    format: str = "original"
    gelu: str = "tanh"
    epsilon: float = 1e-6
    resize: Resize = ALIGN_CORNERS
    preprocessing: Preprocessing = ORIGINAL

    @property
    def name(self) -> str:
        """`variant.tag`."""
        return f"{self.variant}.{self.tag}"

    @property
    def classes(self) -> int | None:
        """Outputs of the head; None when the label set is not known."""
        return CLASSES[self.labels] if self.labels else None

    @property
    def embedded(self) -> bool:
        """Whether the file lies in this package, so that no network is needed."""
        return "://" not in self.url


# Names of AugReg files: vision_transformer `vit_jax_augreg.ipynb`.
AUGREG_MODELS = {
    "Ti_16": "vit_ti16",
    "S_32": "vit_s32",
    "S_16": "vit_s16",
    "B_32": "vit_b32",
    "B_16": "vit_b16",
    "B_8": "vit_b8",
    "L_16": "vit_l16",
    "R_Ti_16": "r_ti16",
    "R26_S_32": "r26_s32",
    "R50_L_32": "r50_l32",
}
AUGREG_NAME = re.compile(
    r"(?P<model>\w+?)-(?P<ds>i1k|i21k|i21k_30)-(?P<epochs>\d+)ep-lr_[\d.e-]+-aug_(?P<aug>\w+)-wd_[\d.]+-do_[\d.]+-sd_[\d.]+"
    r"(?:--(?P<adapt_ds>\w+)-steps_\w+-lr_[\d.e-]+-res_(?P<resolution>\d+))?\.npz"
)
AUGREG_LABELS = {"imagenet2012": "imagenet1k", "kitti": None, "i1k": "imagenet1k", "i21k": "imagenet21k"}


def augreg_row(filename: str, tag: str | None = None, **facts) -> Row:
    """The row of any AugReg file, its variant, label set and image size read off the name.

    Args:
        filename: such as `B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-
            res_384.npz`; without the part after `--` it is a pre-training, at 224 pixels.
        tag: of the row. Default: the file name in the bucket's folder, `augreg/...`.
        **facts: further fields of the row.

    Raises:
        ValueError: this is not such a name.
    """
    found = AUGREG_NAME.fullmatch(filename)
    if found is None or found["model"] not in AUGREG_MODELS:
        raise ValueError(
            "Expected the name of an AugReg file, {model}-{i1k|i21k}-{epochs}ep-lr_…-aug_…-wd_…-do_…-sd_….npz with a "
            f"model of {', '.join(AUGREG_MODELS)}, or one that goes on with --{{dataset}}-steps_…-lr_…-res_….npz. "
            f"Received: {filename!r}"
        )
    data = found["adapt_ds"] or found["ds"].removesuffix("_30")
    return Row(
        variant=AUGREG_MODELS[found["model"]],
        tag=tag or f"augreg/{filename}",
        url=f"{BUCKET}/augreg/{filename}",
        image_size=int(found["resolution"] or 224),
        labels=AUGREG_LABELS.get(data, data if data in CLASSES else None),
        paper=AUGREG,
        **facts,
    )


def _original(variant: str, tag: str, file: str, mib: float, image_size: int, accuracy: float | None = None) -> Row:
    on_21k = tag == "orig_in21k"
    return Row(
        variant,
        tag,
        f"{BUCKET}/{'imagenet21k' if on_21k else 'imagenet21k+imagenet2012'}/{file}.npz",
        image_size,
        labels="imagenet21k" if on_21k else "imagenet1k",
        head="zero" if on_21k else "real",
        pre_logits=on_21k,
        size=round(mib * MIB),
        accuracy=accuracy,
        accuracy_source=README if accuracy else None,
    )


def _sam(variant: str, file: str, mib: float | None = None) -> Row:
    size = None if mib is None else round(mib * MIB)
    return Row(variant, "sam_in1k", f"{BUCKET}/sam/{file}.npz", 224, "imagenet1k", size=size, paper=SAM)


def _pretrained(filename: str, mib: float | None = None) -> Row:
    return augreg_row(f"{filename}.npz", "augreg_in21k", size=None if mib is None else round(mib * MIB))


HUB = "https://huggingface.co"
_IMAGENET = dataclasses.replace(IMAGENET_MEAN, crop=0.9)


def _timm(variant: str, tag: str, model: str, paper: str, image_size: int = 224, **facts) -> Row:
    """timm's copy on the Hugging Face hub; facts from timm 1.0.31, `default_cfgs`."""
    facts = {"labels": "imagenet1k", "preprocessing": _IMAGENET, **facts}
    if image_size == 384:
        facts["preprocessing"] = dataclasses.replace(facts["preprocessing"], crop=1.0)
    url = f"{HUB}/timm/{model}/resolve/main/model.safetensors"
    resize = Resize("antialiased_bicubic")
    return Row(variant, tag, url, image_size, paper=paper, format="timm", gelu="exact", resize=resize, **facts)


def _google(variant: str, model: str, image_size: int) -> Row:
    """Hugging Face's copy of a file of the original code, which computes with the exact GELU."""
    return Row(
        variant,
        f"hf_orig_in21k_ft_in1k_{image_size}",
        f"{HUB}/google/{model}/resolve/main/model.safetensors",
        image_size,
        labels="imagenet1k",
        format="huggingface",
        gelu="exact",
        epsilon=1e-12,
        resize=Resize("bicubic"),
        preprocessing=HUGGING_FACE,
    )


def _tuned(tag: str, filename: str, accuracy: float | None = None) -> Row:
    """A file fine-tuned on ImageNet-1k, its image size added to the tag."""
    tag = f"{tag}_{filename.rpartition('_')[2]}"
    return augreg_row(f"{filename}.npz", tag, accuracy=accuracy, accuracy_source=README if accuracy else None)


_FT, _FT_README, _1K = "augreg_in21k_ft_in1k", "augreg_recommended_in21k_ft_in1k", "augreg_in1k"

_ROWS = (
    Row(
        "vit_mini",
        "fashion_mnist",
        "vit_mini.fashion_mnist.npz",
        28,
        "fashion_mnist",
        size=1_263_998,
        paper="vit-keras-zoo, docs/vit_mini.md",
        accuracy=91.41,
        accuracy_source="docs/vit_mini.md",
    ),
    # gs://vit_models/imagenet21k: 224 pixels, pre_logits, heads not released (all zero).
    _original("vit_b8", "orig_in21k", "ViT-B_8", 393.72, 224),
    _original("vit_b16", "orig_in21k", "ViT-B_16", 393.69, 224),
    _original("vit_b32", "orig_in21k", "ViT-B_32", 400.01, 224),
    _original("vit_l16", "orig_in21k", "ViT-L_16", 1.22 * 1024, 224),
    _original("vit_l32", "orig_in21k", "ViT-L_32", 1.23 * 1024, 224),
    _original("vit_h14", "orig_in21k", "ViT-H_14", 2.46 * 1024, 224),
    _original("r26_b32", "orig_in21k", "R26+ViT-B_32", 450.23, 224),
    _original("r50_b16", "orig_in21k", "R50+ViT-B_16", 439.85, 224),
    _original("r50_l32", "orig_in21k", "R50+ViT-L_32", 1.31 * 1024, 224),
    # gs://vit_models/imagenet21k+imagenet2012: 384 pixels unless the name says 224.
    _original("vit_b8", "orig_in21k_ft_in1k_384", "ViT-B_8", 334.78, 384),
    _original("vit_b16", "orig_in21k_ft_in1k_224", "ViT-B_16-224", 330.29, 224, 81.2),
    _original("vit_b16", "orig_in21k_ft_in1k_384", "ViT-B_16", 331.4, 384),
    _original("vit_b32", "orig_in21k_ft_in1k_384", "ViT-B_32", 336.89, 384),
    _original("vit_l16", "orig_in21k_ft_in1k_224", "ViT-L_16-224", 1.13 * 1024, 224, 82.7),
    _original("vit_l16", "orig_in21k_ft_in1k_384", "ViT-L_16", 1.14 * 1024, 384),
    _original("vit_l32", "orig_in21k_ft_in1k_384", "ViT-L_32", 1.14 * 1024, 384),
    _original("r50_b16", "orig_in21k_ft_in1k_384", "R50+ViT-B_16", 377.57, 384),
    # gs://vit_models/sam: ImageNet-1k alone, sharpness-aware minimisation.
    _sam("vit_s16", "ViT-S_16", 252.57),
    _sam("vit_b16", "ViT-B_16", 330.3),
    _sam("vit_b32", "ViT-B_32"),
    _sam("vit_l16", "ViT-L_16"),
    _sam("vit_l32", "ViT-L_32"),
    # gs://vit_models/augreg: the recommended pre-training of each model (README; B/8: best final_val of index.csv).
    _pretrained("Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", 37),
    _pretrained("S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0", 118),
    _pretrained("S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0", 115),
    _pretrained("B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", 398),
    _pretrained("B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0", 391),
    _pretrained("B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0"),
    _pretrained("L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0", 1243),
    _pretrained("R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0", 40),
    _pretrained("R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0", 170),
    _pretrained("R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1", 1337),
    # Fine-tuned on ImageNet-1k: the files of timm's `augreg_in21k_ft_in1k`; accuracies where the README lists the file.
    _tuned(_FT, "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224"),
    _tuned(
        _FT, "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384", 78.22
    ),
    _tuned(_FT, "S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224"),
    _tuned(_FT, "S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384"),
    _tuned(_FT, "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224"),
    _tuned(
        _FT, "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384", 83.73
    ),
    _tuned(_FT, "B_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224"),
    _tuned(_FT, "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384"),
    _tuned(_FT, "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_224"),
    _tuned(_FT, "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384"),
    _tuned(_FT, "B_8-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_224"),
    _tuned(_FT, "L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_224"),
    _tuned(_FT, "L_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_384"),
    _tuned(_FT, "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224"),
    _tuned(
        _FT, "R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384", 75.4
    ),
    _tuned(
        _FT, "R26_S_32-i21k-300ep-lr_0.001-aug_light0-wd_0.03-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.03-res_224"
    ),
    _tuned(
        _FT, "R26_S_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384"
    ),
    _tuned(
        _FT, "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_224"
    ),
    _tuned(
        _FT, "R50_L_32-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384"
    ),
    # Fine-tuned on ImageNet-1k: the README's choice, where it is another file than timm's.
    _tuned(
        _FT_README,
        "S_32-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
        79.58,
    ),
    _tuned(
        _FT_README,
        "B_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
        83.59,
    ),
    _tuned(
        _FT_README,
        "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384",
        85.49,
    ),
    _tuned(
        _FT_README,
        "L_16-i21k-300ep-lr_0.001-aug_strong1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
        85.59,
    ),
    _tuned(
        _FT_README,
        "R26_S_32-i21k-300ep-lr_0.001-aug_light1-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384",
        83.85,
    ),
    _tuned(
        _FT_README,
        "R50_L_32-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_384",
        85.99,
    ),
    # ImageNet-1k alone.
    _tuned(_1K, "S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_224"),
    _tuned(_1K, "S_16-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_384"),
    _tuned(_1K, "B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_224"),
    _tuned(_1K, "B_32-i1k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_384"),
    _tuned(_1K, "B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_224"),
    _tuned(_1K, "B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1--imagenet2012-steps_20k-lr_0.01-res_384"),
)

DEIT, DINO, MAE = "arXiv:2012.12877", "arXiv:2104.14294", "arXiv:2111.06377"
_NO_HEAD: dict[str, Any] = {"labels": None, "head": None}
_NOT_COMMERCIAL: dict[str, Any] = {**_NO_HEAD, "license": "CC-BY-NC-4.0"}
_HUB_ROWS = (
    _timm("vit_ti16", "deit_in1k", "deit_tiny_patch16_224.fb_in1k", DEIT),
    _timm("vit_s16", "deit_in1k", "deit_small_patch16_224.fb_in1k", DEIT),
    _timm("vit_b16", "deit_in1k", "deit_base_patch16_224.fb_in1k", DEIT),
    _timm("vit_b16", "deit_in1k_384", "deit_base_patch16_384.fb_in1k", DEIT, 384),
    _timm("vit_ti16", "deit_distilled_in1k", "deit_tiny_distilled_patch16_224.fb_in1k", DEIT),
    _timm("vit_s16", "deit_distilled_in1k", "deit_small_distilled_patch16_224.fb_in1k", DEIT),
    _timm("vit_b16", "deit_distilled_in1k", "deit_base_distilled_patch16_224.fb_in1k", DEIT),
    _timm("vit_b16", "deit_distilled_in1k_384", "deit_base_distilled_patch16_384.fb_in1k", DEIT, 384),
    _timm("vit_s16", "dino", "vit_small_patch16_224.dino", DINO, **_NO_HEAD),
    _timm("vit_b16", "dino", "vit_base_patch16_224.dino", DINO, **_NO_HEAD),
    _timm("vit_b8", "dino", "vit_base_patch8_224.dino", DINO, **_NO_HEAD),
    _timm("vit_b16", "mae", "vit_base_patch16_224.mae", MAE, **_NOT_COMMERCIAL),
    _timm("vit_l16", "mae", "vit_large_patch16_224.mae", MAE, **_NOT_COMMERCIAL),
    _timm("vit_h14", "mae", "vit_huge_patch14_224.mae", MAE, **_NOT_COMMERCIAL),
    _timm("vit_b16", "augreg2_in21k_ft_in1k", "vit_base_patch16_224.augreg2_in21k_ft_in1k", AUGREG, preprocessing=TIMM),
    _timm("vit_b8", "augreg2_in21k_ft_in1k", "vit_base_patch8_224.augreg2_in21k_ft_in1k", AUGREG, preprocessing=TIMM),
    _google("vit_b16", "vit-base-patch16-224", 224),
    _google("vit_b16", "vit-base-patch16-384", 384),
    _google("vit_b32", "vit-base-patch32-384", 384),
    _google("vit_l16", "vit-large-patch16-224", 224),
    _google("vit_l16", "vit-large-patch16-384", 384),
    _google("vit_l32", "vit-large-patch32-384", 384),
)
ROWS: dict[str, Row] = {row.name: row for row in (*_ROWS, *_HUB_ROWS)}

# Names that say what the weights were trained on, the old vit-keras package's among them: the first tag that a variant
# has. The original files come first, at 384 pixels, as in that package.
NAMED_WEIGHTS = {
    "imagenet21k+imagenet2012": ("orig_in21k_ft_in1k_384", "augreg_in21k_ft_in1k_384", "augreg_in21k_ft_in1k_224"),
    "imagenet21k": ("orig_in21k", "augreg_in21k"),
}


def list_weights(pattern: str = "*") -> list[str]:
    """Names `variant.tag` of the published weights.

    Args:
        pattern: shell pattern such as `"*augreg*384"`. Default: all.
    """
    return [name for name in ROWS if fnmatch.fnmatchcase(name, pattern)]


def find(variant: str, weights: str) -> Row:
    """The row that a name of weights means for a variant.

    Args:
        variant: name of the architecture.
        weights: `"imagenet21k+imagenet2012"`, `"imagenet21k"`, a tag, a full name `variant.tag`, or
            `"augreg/<file name>.npz"` for any file of the AugReg bucket.

    Raises:
        ValueError: there are no such weights, or they are another variant's; what there is is listed.
    """
    row = _find(variant, weights)
    if row is None:
        there = ", ".join(row.tag for row in ROWS.values() if row.variant == variant)
        there = f"There is {there}" if there else "No weights of it are published"
        raise ValueError(
            f"There are no weights {weights!r} for {variant}. {there}; or pass the path of a checkpoint, "
            "weights='/path/file.npz', or pretrained=False."
        )
    if row.variant != variant:
        raise ValueError(f"The weights {weights!r} are {row.variant}'s. Received: {variant}")
    return row


def knows(variant: str, weights: str) -> bool:
    """Whether `weights` is a name: that of a row of the variant or of another, or of an AugReg file."""
    return weights.startswith("augreg/") or weights in NAMED_WEIGHTS or _find(variant, weights) is not None


def _find(variant: str, weights: str) -> Row | None:
    if weights.startswith("augreg/"):
        row = augreg_row(weights.removeprefix("augreg/"))
        return next((known for known in _ROWS if known.url == row.url), row)
    owner, _, tag = weights.rpartition(".")
    names = (f"{owner or variant}.{tag}" for tag in NAMED_WEIGHTS.get(weights, (tag,)))
    return next((ROWS[name] for name in names if name in ROWS), None)
