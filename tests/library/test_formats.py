"""Formats of other libraries: what they compute, they compute here; and the way back."""

import json
import shutil

import keras
import numpy as np
import pytest

import vit_keras
from tests.conftest import GOLDEN, golden, images, randomise, tiny
from tests.peers import HUGGING_FACE, TALL, TIMM, images_of
from vit_keras.checkpoints import CheckpointError, checkpoint_of, kinds, open_checkpoint, save_checkpoint
from vit_keras.checkpoints.files import open_file

PEERS = GOLDEN / "peers"
TORCH = [("timm", case) for case in TIMM] + [("transformers", case) for case in HUGGING_FACE]
IDS = [f"{library}-{case}" for library, case in TORCH]
FORMATS = {"timm": "timm", "transformers": "huggingface"}
TIMM_CONFIG = {"architecture": "vit_base_patch16_224", "model_args": {"num_heads": 4}}


@pytest.fixture(name="saved", params=TORCH, ids=IDS)
def _saved(request, tmp_path):
    """(library, case, folder as the library saves it, golden outputs)."""
    library, case = request.param
    file = golden(f"peers/{library}_{case}")
    config = json.loads(str(file["config"])) if "config" in file else dict(TIMM_CONFIG)
    if case == "tanh":
        config["model_args"] = {**config["model_args"], "act_layer": "gelu_tanh"}
    if case == "rectangle":
        config["model_args"] = {**config["model_args"], "img_size": [48, 32]}
    if case == "class_token_without_position":
        config["pretrained_cfg"] = {"input_size": [3, 32, 32]}
    folder = tmp_path / case
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {key.removeprefix("weights/"): value for key, value in file.items() if key.startswith("weights/")}
    kinds.write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
    return library, case, folder, file


def run(model, size, outputs):
    """What a model says; every token, when the library's outputs are tokens."""
    if outputs.ndim == 3:
        model = keras.Model(model.input, model.get_layer("Transformer_encoder_norm").output)
    return np.asarray(model(images_of(size)))


def test_the_librarys_outputs(saved):
    _, case, folder, file = saved
    model = vit_keras.from_checkpoint(folder)
    found = run(model, (48, 32) if case == "rectangle" else (32, 32), file["outputs"])
    np.testing.assert_allclose(found, file["outputs"], atol=2e-5 * np.abs(file["outputs"]).max(), rtol=0)
    if case.startswith("hybrid"):  # what outputs of this size do not show
        assert model.get_layer("gn_root").epsilon == 1e-5
    if "faint_outputs" in file:
        np.testing.assert_allclose(model(images_of((32, 32)) / 256), file["faint_outputs"], atol=2e-5)


@pytest.mark.parametrize("case", TALL)
def test_positions_are_resized_as_the_library_does(case, tmp_path):
    library = "timm" if case in TIMM and case not in ("dinov2",) else "transformers"
    file = golden(f"peers/{library}_{case}")
    arrays = {key.removeprefix("weights/"): value for key, value in file.items() if key.startswith("weights/")}
    options = {"epsilon": 1e-12} if case == "vit" else {}
    model = vit_keras.from_checkpoint(arrays, image_size=(48, 32), num_heads=4, source_grid=(4, 4), **options)
    found = run(model, (48, 32), file["tall_outputs"])
    np.testing.assert_allclose(found, file["tall_outputs"], atol=2e-5 * np.abs(found).max(), rtol=0)


def test_there_and_back_is_bit_equal(saved, tmp_path):
    library, case, folder, _ = saved
    if case.startswith("hybrid"):
        pytest.skip("timm has no stem of this width; tests/conversion/test_peers.py takes its own")
    model = vit_keras.from_checkpoint(folder)
    save_checkpoint(model, tmp_path / "out", FORMATS[library])
    before, after = (
        {key: entry.read() for key, entry in open_file(path).entries.items()} for path in (folder, tmp_path / "out")
    )
    assert before.keys() == after.keys()
    for key in before.keys() - {key for key in before if "mask_token" in key}:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    again = vit_keras.from_checkpoint(tmp_path / "out")
    size = (48, 32) if case == "rectangle" else (32, 32)
    np.testing.assert_array_equal(again(images_of(size)), model(images_of(size)))


@pytest.mark.parametrize("case", ["token", "gap"])
def test_keras_hub(case, tmp_path):
    expected = golden(f"peers/keras_hub_{case}/io")["outputs"]
    model = vit_keras.from_checkpoint(PEERS / f"keras_hub_{case}")
    np.testing.assert_allclose(model(images_of((32, 32))), expected, atol=2e-6)
    assert model.get_layer("Transformer_encoder_norm").epsilon == 1e-5
    save_checkpoint(model, tmp_path / "out", "keras_hub")
    for name in ("model.weights.h5", "task.weights.h5"):
        before, after = (
            kinds.hdf5_entries("x", str(at / name)) for at in (PEERS / f"keras_hub_{case}", tmp_path / "out")
        )
        assert before.keys() == after.keys()
        for key in before.keys() - {"optimizer/vars/1", "optimizer/vars/0"}:
            np.testing.assert_array_equal(after[key].read(), before[key].read())
    for name in ("config.json", "task.json"):
        wanted = json.loads((PEERS / f"keras_hub_{case}" / name).read_text())["config"]
        found = json.loads((tmp_path / "out" / name).read_text())["config"]
        for key in wanted.keys() - {"dtype", "backbone", "preprocessor", "name"}:
            assert found[key] == wanted[key], key


@pytest.mark.parametrize("file", ["plain.weights.h5", "plain.h5", "pre_logits.weights.h5", "01.h5"])
def test_old_vit_keras(file):
    expected = golden(f"peers/vit_keras_{file.split('.')[0]}")["outputs"]
    options = {} if file.endswith("plain.h5") else {"num_heads": 4}
    model = vit_keras.from_checkpoint(PEERS / f"vit_keras_{file}", **options)
    np.testing.assert_allclose(model(images_of((32, 32))), expected, atol=2e-6)
    assert model.get_layer("Transformer_encoderblock_0").gelu == "exact"


def peer_arrays(name):
    return {k.removeprefix("weights/"): v for k, v in golden(f"peers/{name}").items() if k.startswith("weights/")}


WRAPPED = {
    "MAE": lambda key: f"model.{key}",
    "MoCo v3": lambda key: f"state_dict.module.base_encoder.{key}",
    "DINO": lambda key: f"teacher.backbone.{key}",
    "DINO, distributed": lambda key: f"teacher.module.backbone.{key}",
}
BESIDE = {
    "MAE": ["model.mask_token", "model.decoder_blocks.0.norm1.weight", "model.decoder_pos_embed"],
    "MoCo v3": ["state_dict.module.base_encoder.head.0.weight", "state_dict.module.predictor.0.weight"],
    "DINO": ["teacher.head.mlp.0.weight", "teacher.head.last_layer.weight_g"],
    "DINO, distributed": [],
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_state_dicts_of_pre_training(wrapping):
    """The encoder is found behind its prefix, once, and what stands beside it is left out and said."""
    arrays = {key: value for key, value in peer_arrays("timm_plain").items() if not key.startswith("head.")}
    wrapped = {WRAPPED[wrapping](key): value for key, value in arrays.items()}
    if wrapping != "MAE":
        second = {"MoCo v3": "momentum_encoder", "DINO": "student", "DINO, distributed": "student"}[wrapping]
        first = {"MoCo v3": "base_encoder"}.get(wrapping, "teacher")
        wrapped |= {key.replace(first, second): 2 * value for key, value in wrapped.items()}
    beside = dict.fromkeys(BESIDE[wrapping], np.zeros(3))
    model = vit_keras.from_checkpoint({**wrapped, **beside}, num_heads=4)
    plain = vit_keras.from_checkpoint(arrays, num_heads=4)
    np.testing.assert_array_equal(model(images_of((32, 32))), plain(images_of((32, 32))))
    assert set(beside) <= set(open_checkpoint({**wrapped, **beside}).left_out)


def test_facebooks_names_of_dinov2():
    """Their tables have a row for the class token, which timm adds to the token when it converts them."""
    arrays = peer_arrays("timm_registers")
    row = np.random.default_rng(0).normal(size=(1, 1, 24)).astype("float32")
    renamed = {key.replace("reg_token", "register_tokens"): value for key, value in arrays.items()}
    renamed = {key.replace("blocks.1.", "blocks.0.1."): value for key, value in renamed.items()}
    renamed["mask_token"] = np.zeros((1, 24))
    renamed["pos_embed"] = np.concatenate([row, arrays["pos_embed"]], axis=1)
    arrays["cls_token"] = arrays["cls_token"] + row
    a, b = (vit_keras.from_checkpoint(each, num_heads=4)(images_of((32, 32))) for each in (arrays, renamed))
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("case", "model"), [("vit", "vit"), ("deit_with_teacher", "deit"), ("dinov2_head", "dinov2")])
def test_names_of_transformers_5(case, model):
    """The names that modules have inside transformers 5, which some files hold."""
    names = {
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
    }
    if model != "dinov2":
        names |= {"encoder.layer": "layers", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2"}
    arrays, renamed = peer_arrays(f"transformers_{case}"), {}
    for key, value in arrays.items():
        for old, new in names.items():
            key = key.replace(old, new)
        renamed[key] = value
    assert f"{model}.{'encoder.layer' if model == 'dinov2' else 'layers'}.1.attention.q_proj.weight" in renamed
    a, b = (vit_keras.from_checkpoint(each, num_heads=4)(images_of((32, 32))) for each in (arrays, renamed))
    np.testing.assert_array_equal(a, b)


# --- what travels beside the arrays ----------------------------------------------------------------------------------


def test_numerics_and_preprocessing_of_a_folder_are_kept(tmp_path):
    model = vit_keras.from_checkpoint(golden("vit_token"))
    for to, file, said in (
        ("huggingface", "config.json", {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}),
        ("timm", "config.json", {"global_pool": "token"}),
    ):
        save_checkpoint(model, tmp_path / to, to)
        assert said.items() <= json.loads((tmp_path / to / file).read_text()).items()
        again = vit_keras.from_checkpoint(tmp_path / to)
        np.testing.assert_array_equal(again(images(1, 64, 64, 3)), model(images(1, 64, 64, 3)))
        pixels = vit_keras.preprocessing.of(again)
        np.testing.assert_allclose(pixels.offset_and_scale(), vit_keras.preprocessing.of(model).offset_and_scale())
        assert (pixels.resize, pixels.interpolation) == ("squash", "bilinear")
    assert json.loads((tmp_path / "timm/config.json").read_text())["model_args"]["act_layer"] == "gelu_tanh"


@pytest.mark.parametrize("to", ["huggingface", "timm"])
def test_labels_travel(to, tmp_path):
    """vit_mini knows clothes, and still does on the way back."""
    save_checkpoint(vit_keras.vit.vit_mini(), tmp_path / "out", to)
    predictor = vit_keras.Predictor(vit_keras.from_checkpoint(tmp_path / "out"))
    assert predictor.labels[9] == "Ankle boot"


def test_a_format_that_computes_otherwise_is_refused(tmp_path):
    model = tiny()
    with pytest.raises(CheckpointError, match=r"numerics: keras-hub's ViT computes GELU in its exact form"):
        save_checkpoint(model, tmp_path / "out", "keras_hub")
    assert not (tmp_path / "out").exists()
    save_checkpoint(model, tmp_path / "out", "keras_hub", accept_numerics=True)
    assert (tmp_path / "out" / "task.weights.h5").exists()


REFUSED = [
    ({"registers": 1}, "original", "This format has no name for"),
    ({"distillation": True}, "keras_hub", "cannot have a distillation token"),
    ({"pooling": "gap", "class_token": True}, "huggingface", "reads the class token, this model has pooling 'gap'"),
    ({"representation_size": 8}, "timm", "no layer for pre_logits"),
    ({"representation_size": 8}, "huggingface", "pooler"),
    ({"position": "sincos_2d"}, "timm", "no place for fixed sines"),
    ({"position": "learned_2d"}, "timm", "no name for"),
    ({"pooling": "map", "class_token": True}, "timm", "leaves class and register tokens out"),
    ({"layer_scale": 0.1}, "huggingface", "reads class token and mean|no layer-scale"),
    ({"epsilon": 1e-3}, "timm", "LayerNorm epsilon of 1e-06, these weights need 0.001"),
]


@pytest.mark.parametrize(("changes", "to", "message"), REFUSED, ids=[f"{next(iter(c))}-{to}" for c, to, _ in REFUSED])
def test_what_a_format_cannot_say_is_refused(changes, to, message, tmp_path):
    model = tiny(**{"gelu": "exact", **changes} if to == "keras_hub" else changes)
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(model, tmp_path / "out", to)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_or_half_written(tmp_path, monkeypatch):
    model = tiny()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        save_checkpoint(model, tmp_path / "out", "timm")
    monkeypatch.setattr("vit_keras.checkpoints.export.write_json", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(model, tmp_path / "out", "timm", force=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]
    monkeypatch.undo()
    save_checkpoint(model, tmp_path / "out", "timm", force=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model.safetensors", "out"]


# --- surgery ---------------------------------------------------------------------------------------------------------


def test_a_model_is_a_source_too():
    """So that a model of one's own moves to another size, patch, number of classes or channels."""
    model = randomise(tiny(distillation=True, registers=2, layer_scale=0.1, gelu="exact"))
    same = vit_keras.from_checkpoint(model)
    np.testing.assert_array_equal(same(images()), model(images()))
    other = vit_keras.from_checkpoint(model, image_size=(48, 32), classes=3, in_channels=1, patch_size=16)
    assert other.output_shape == (None, 3)
    assert other.input_shape == (None, 48, 32, 1)
    assert checkpoint_of(model).facts.registers == 2


@pytest.mark.parametrize("new", [(16, 16), (12, 20), (8, 8)])
def test_a_resized_patch_gives_its_token(new):
    """Beyer et al. 2023, section 3.4: exact where no information is lost."""
    rng = np.random.default_rng(0)
    kernel, patch = rng.normal(size=(8, 8, 3, 5)), rng.normal(size=(8, 8, 3))
    larger = keras.ops.image.resize(patch[None].astype("float32"), new, antialias=False, data_format="channels_last")
    token = np.einsum("hwc,hwcd->d", patch, kernel)
    resized = vit_keras.layers.resize_patch(kernel, new)
    again = np.einsum("hwc,hwcd->d", np.asarray(larger, "float64")[0], resized)
    np.testing.assert_allclose(again, token, atol=1e-5 * np.abs(token).max())


@pytest.mark.parametrize("new", [(4, 4), (6, 5), (3, 8)])
def test_a_smaller_patch_is_the_pseudo_inverse(new):
    """Against the formula written naively: the resize of every basis patch, and the pseudo-inverse of the whole."""
    from conversion.reference import resize_patch

    kernel = np.random.default_rng(0).normal(size=(8, 8, 2, 3))
    np.testing.assert_allclose(vit_keras.layers.resize_patch(kernel, new), resize_patch(kernel, new), atol=1e-6)


def test_another_patch_is_refused_unless_asked_for():
    with pytest.raises(CheckpointError, match=r"embedding/kernel: wrong shape"):
        vit_keras.load_weights_from(tiny(patch_size=16, image_size=64), checkpoint_of(tiny()), top=False)
    model = tiny(patch_size=16, image_size=64)
    report = vit_keras.load_weights_from(model, checkpoint_of(randomise(tiny())), resize_patch=True)
    assert "the patch embedding resized from (8, 8) to (16, 16) pixels" in str(report)


def test_counts_that_read_in_two_ways():
    """25 rows: 5x5 places without a row for the class token, or 4x6 with one."""
    arrays = peer_arrays("timm_rectangle")
    assert arrays["pos_embed"].shape[1] == 25
    with pytest.raises(CheckpointError, match=r"25 rows .*1 before 24 others or 0 before a grid of 5x5"):
        vit_keras.from_checkpoint(arrays, num_heads=4)
    model = vit_keras.from_checkpoint(arrays, num_heads=4, source_grid=(6, 4))
    assert model.input_shape == (None, 48, 32, 3)
    registers = peer_arrays("timm_registers")
    registers["pos_embed"] = registers["pos_embed"][:, :9]
    assert vit_keras.from_checkpoint(registers, num_heads=4).input_shape == (None, 24, 24, 3)
    registers["pos_embed"] = np.zeros((1, 1, 24))
    with pytest.raises(CheckpointError, match="no square"):
        vit_keras.from_checkpoint({**registers, "pos_embed": np.zeros((1, 12, 24))}, num_heads=4)


def test_heads_that_no_file_tells():
    with pytest.raises(CheckpointError, match=r"does not say its number of heads.*pass num_heads"):
        vit_keras.from_checkpoint(peer_arrays("timm_plain"))


# --- distilled models ------------------------------------------------------------------------------------------------


def test_distilled_outputs():
    """Both heads in training, their mean else: facebookresearch/deit `models.py`."""
    model = randomise(tiny(distillation=True))
    both = np.asarray(model(images(), training=True))
    assert both.shape == (2, 2, 5)
    np.testing.assert_allclose(model(images()), both.mean(axis=1), atol=1e-6)
    always = tiny(distillation=True, pooling="both")
    always.set_weights(model.get_weights())
    np.testing.assert_allclose(always(images()), both, atol=1e-6)
    model.compile("sgd", lambda y, outputs: keras.ops.mean(outputs**2), jit_compile=False)
    assert np.isfinite(model.train_on_batch(images(), np.ones((2, 5))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "both"}, "needs distillation=True"),
        ({"distillation": True, "pooling": "gap"}, "needs pooling='token' or 'both'"),
        ({"distillation": True, "class_token": False}, "needs class_token=True"),
        ({"distillation": True, "representation_size": 8}, "no place for `representation_size`"),
        ({"norm_after_pooling": True, "pooling": "map"}, "needs pooling='gap' or 'token'"),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_pytorch_files_need_pytorch(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__
    monkeypatch.setattr(
        "importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError) if name == "torch" else real(name)
    )
    (tmp_path / "x.pth").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ImportError, match=r"x.pth is a PyTorch file: .*pip install 'vit-keras-zoo\[torch\]'"):
        open_checkpoint(tmp_path / "x.pth")


def test_own_weights_without_their_architecture(tmp_path):
    tiny().save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(CheckpointError, match=r"without its architecture\. Build the model, call its load_weights"):
        open_checkpoint(tmp_path / "m.weights.h5")


def test_shards(tmp_path):
    arrays = peer_arrays("transformers_vit")
    names = {key: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, key in enumerate(arrays)}
    for name in set(names.values()):
        kinds.write_safetensors(tmp_path / name, {k: v for k, v in arrays.items() if names[k] == name}, {})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "config.json").write_text(str(golden("peers/transformers_vit")["config"]))
    expected = golden("peers/transformers_vit")["outputs"]
    np.testing.assert_allclose(vit_keras.from_checkpoint(tmp_path)(images_of((32, 32))), expected, atol=2e-6)
    names["evil"] = "../evil.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="does not lie beside it"):
        open_checkpoint(tmp_path)
    shutil.rmtree(tmp_path)
