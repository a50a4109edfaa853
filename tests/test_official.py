"""mpp/official.py against timm's own import of the same files, and the table of names and shapes of the files."""

import pickle

import numpy as np
import pytest
import timm
import torch

from mpp.errors import UserError
from mpp.official import read, to_timm

# What the official files hold, as the fact sheet of the format says and not as the module has it.
SMALL = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 32}


def transformer_shapes(width, heads, depth, kernel, entries, mlp=4, head=None, pre_logits=False):
    shapes = {
        "cls": (1, 1, width),
        "embedding/kernel": (*kernel, width),
        "embedding/bias": (width,),
        "Transformer/posembed_input/pos_embedding": (1, entries, width),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
    }
    for i in range(depth):
        block = f"Transformer/encoderblock_{i}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            shapes[f"{attention}/{part}/kernel"] = (width, heads, width // heads)
            shapes[f"{attention}/{part}/bias"] = (heads, width // heads)
        shapes[f"{attention}/out/kernel"] = (heads, width // heads, width)
        shapes[f"{attention}/out/bias"] = (width,)
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes[f"{block}/{norm}/scale"] = shapes[f"{block}/{norm}/bias"] = (width,)
        shapes[f"{block}/MlpBlock_3/Dense_0/kernel"] = (width, mlp * width)
        shapes[f"{block}/MlpBlock_3/Dense_0/bias"] = (mlp * width,)
        shapes[f"{block}/MlpBlock_3/Dense_1/kernel"] = (mlp * width, width)
        shapes[f"{block}/MlpBlock_3/Dense_1/bias"] = (width,)
    if pre_logits:
        shapes |= {"pre_logits/kernel": (width, width), "pre_logits/bias": (width,)}
    if head:
        shapes |= {"head/kernel": (width, head), "head/bias": (head,)}
    return shapes


def hybrid_shapes(units, **transformer):
    shapes = {"conv_root/kernel": (7, 7, 3, 64), "gn_root/scale": (64,), "gn_root/bias": (64,)}
    entering = 64
    for stage, count in enumerate(units):
        inner, outer = 64 * 2**stage, 256 * 2**stage
        for unit in range(1, count + 1):
            at = f"block{stage + 1}/unit{unit}"
            kernels = {"1": (1, 1, entering, inner), "2": (3, 3, inner, inner), "3": (1, 1, inner, outer)}
            if unit == 1:
                kernels["_proj"] = (1, 1, entering, outer)
            for number, kernel in kernels.items():
                shapes[f"{at}/conv{number}/kernel"] = kernel
                shapes[f"{at}/gn{number}/scale"] = shapes[f"{at}/gn{number}/bias"] = (kernel[-1],)
            entering = outer
    return shapes | transformer_shapes(kernel=(1, 1, entering), **transformer)


def bit_shapes(units, head):
    shapes = {"resnet/root_block/standardized_conv2d/kernel": (7, 7, 3, 64)}
    entering = 64
    for stage, count in enumerate(units):
        inner, outer = 64 * 2**stage, 256 * 2**stage
        for unit in range(1, count + 1):
            at = f"resnet/block{stage + 1}/unit{unit:02d}"
            kernels = {"a": (1, 1, entering, inner), "b": (3, 3, inner, inner), "c": (1, 1, inner, outer)}
            for letter, kernel in kernels.items():
                shapes[f"{at}/{letter}/standardized_conv2d/kernel"] = kernel
                shapes[f"{at}/{letter}/group_norm/gamma"] = (kernel[2],)
                shapes[f"{at}/{letter}/group_norm/beta"] = (kernel[2],)
            if unit == 1:
                shapes[f"{at}/a/proj/standardized_conv2d/kernel"] = (1, 1, entering, outer)
            entering = outer
    shapes |= {"resnet/group_norm/gamma": (entering,), "resnet/group_norm/beta": (entering,)}
    return shapes | {"resnet/head/conv2d/kernel": (1, 1, entering, head), "resnet/head/conv2d/bias": (head,)}


def filled(shapes):
    """Random arrays; vectors that multiply are near 1, so that no feature overflows."""
    draw = np.random.default_rng(0)
    arrays = {}
    for name, shape in shapes.items():
        array = draw.standard_normal(shape, np.float32) * np.float32(0.05)
        arrays[name] = array + 1 if name.endswith(("scale", "gamma")) else array
    return arrays


def small_arrays(depth=2, head=5, **more):
    return filled(transformer_shapes(24, 3, depth, (8, 8, 3), 17, head=head, **more))


def small_encoder(**changes):
    return timm.create_model("vit_tiny_patch16_224", **{"num_classes": 0, **SMALL, **changes})


def written(path, arrays):
    np.savez(path, **arrays)
    return path


def loaded(name, path, **changes):
    encoder = timm.create_model(name, **changes).eval()
    tensors = to_timm(read(path), encoder, str(path))
    assert all(value.dtype == torch.float32 and value.is_contiguous() for value in tensors.values())
    own = encoder.state_dict()
    encoder.load_state_dict({n: tensors[n] if not n.startswith("head.") else own[n] for n in own})
    return encoder


FAMILIES = {
    "vit_base_patch16_224": (
        {"depth": 2, "img_size": 64},
        transformer_shapes(768, 12, 2, (16, 16, 3), 17, head=21843, pre_logits=True),
    ),
    "vit_large_patch16_224": ({"depth": 1, "img_size": 64}, transformer_shapes(1024, 16, 1, (16, 16, 3), 17, head=10)),
    "vit_huge_patch14_224": ({"depth": 1, "img_size": 56}, transformer_shapes(1280, 16, 1, (14, 14, 3), 17)),
    "vit_base_r50_s16_224": (
        {"depth": 1, "img_size": 64},
        hybrid_shapes((3, 4, 9), width=768, heads=12, depth=1, entries=17, head=10),
    ),
    "vit_large_r50_s32_224": (
        {"depth": 1, "img_size": 64},
        hybrid_shapes((3, 4, 6, 3), width=1024, heads=16, depth=1, entries=5, head=10),
    ),
    "resnetv2_50x1_bit": ({}, bit_shapes((3, 4, 6, 3), head=10)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_features_are_those_of_timms_own_import_bit_for_bit(name, tmp_path):
    changes, shapes = FAMILIES[name]
    path = written(tmp_path / "official.npz", filled(shapes))
    ours = loaded(name, path, **changes)
    theirs = timm.create_model(name, **changes).eval()
    theirs.load_pretrained(str(path))
    for parameter, value in theirs.state_dict().items():
        if not parameter.startswith("head."):
            assert torch.equal(ours.state_dict()[parameter], value), parameter
    image = torch.randn(1, 3, changes.get("img_size", 64), changes.get("img_size", 64))
    with torch.no_grad():
        features = ours.forward_features(image)
        assert torch.equal(features, theirs.forward_features(image))
    assert features.isfinite().all() and features.std() > 0


def test_a_hybrid_whose_resnet_is_the_stem_alone(tmp_path):
    shapes = transformer_shapes(192, 3, 1, (8, 8, 64), 5)
    shapes |= {"conv_root/kernel": (7, 7, 3, 64), "gn_root/scale": (64,), "gn_root/bias": (64,)}
    path = written(tmp_path / "official.npz", filled(shapes))
    ours = loaded("vit_tiny_r_s16_p8_224", path, depth=1, img_size=64, num_classes=0)
    theirs = timm.create_model("vit_tiny_r_s16_p8_224", depth=1, img_size=64, num_classes=0)
    theirs.load_pretrained(str(path))
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(("pre_logits", "count"), [(False, 200), (True, 202)])
def test_a_full_b16_has_its_arrays_and_all_are_used(pre_logits, count):
    shapes = transformer_shapes(768, 12, 12, (16, 16, 3), 197, head=21843, pre_logits=pre_logits)
    assert len(shapes) == count
    arrays = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    with torch.device("meta"):
        encoder = timm.create_model("vit_base_patch16_224", num_classes=0)
    tensors = to_timm(arrays, encoder, "there")
    heads = {"head.weight", "head.bias"} | ({"pre_logits.weight", "pre_logits.bias"} if pre_logits else set())
    assert set(tensors) == set(encoder.state_dict()) | heads
    assert all(tensors[name].shape == value.shape for name, value in encoder.state_dict().items())
    with pytest.raises(UserError) as refusal:
        to_timm({}, encoder, "there")
    listed = {line.split()[1] for line in str(refusal.value).splitlines()[1:]}
    assert listed == {name for name in shapes if not name.startswith(("head/", "pre_logits/"))}


def test_heads_are_returned_in_torchs_layout_for_any_number_of_classes():
    arrays = small_arrays(head=5, pre_logits=True)
    tensors = to_timm(arrays, small_encoder(num_classes=7), "there")
    for official, name in (("head", "head"), ("pre_logits", "pre_logits")):
        np.testing.assert_array_equal(tensors[f"{name}.weight"].numpy(), arrays[f"{official}/kernel"].T)
        np.testing.assert_array_equal(tensors[f"{name}.bias"].numpy(), arrays[f"{official}/bias"])
    with torch.device("meta"):
        encoder = timm.create_model("resnetv2_50x1_bit", num_classes=3)
    arrays = filled(bit_shapes((3, 4, 6, 3), head=5))
    tensors = to_timm(arrays, encoder, "there")
    kernel = arrays["resnet/head/conv2d/kernel"]
    np.testing.assert_array_equal(tensors["head.weight"].numpy()[:, :, 0, 0], kernel[0, 0].T)
    np.testing.assert_array_equal(tensors["head.bias"].numpy(), arrays["resnet/head/conv2d/bias"])
    assert not any(name.startswith("head.fc") for name in tensors)


def renumbered(arrays):
    new = {"MultiHeadDotProductAttention_1": "MultiHeadDotProductAttention_0"}
    new |= {"LayerNorm_2": "LayerNorm_1", "MlpBlock_3": "MlpBlock_0"}
    return {"/".join(new.get(part, part) for part in name.split("/")): array for name, array in arrays.items()}


def scanned(arrays):
    found = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    for name in arrays:
        if "encoderblock_0/" in name:
            blocks = [arrays[name.replace("encoderblock_0/", f"encoderblock_{i}/")] for i in range(2)]
            found[name.replace("encoderblock_0/", "encoderblock/")] = np.stack(blocks)
    return found


def prefixed(prefix, more=()):
    return lambda arrays: {f"{prefix}{name}": array for name, array in arrays.items()} | dict.fromkeys(more, np.ones(2))


@pytest.mark.parametrize(
    "change",
    [
        renumbered,
        scanned,
        lambda arrays: scanned(renumbered(arrays)),
        prefixed("opt/target/", ["opt/state/step"]),
        prefixed("params/", ["opt/mu/embedding/kernel"]),
        prefixed("params/img/", ["params/t", "params/txt/head/kernel"]),
        lambda arrays: {name: array.astype(np.float64) for name, array in arrays.items()},
        lambda arrays: {name: array.astype(">f4") for name, array in arrays.items()},
        lambda arrays: {name: np.asfortranarray(array) for name, array in arrays.items()},
    ],
    ids=["renumbered", "scanned", "both", "opt", "params", "img", "float64", "big_endian", "fortran"],
)
def test_other_forms_of_a_file_give_the_same(change, tmp_path):
    arrays = small_arrays()
    usual = to_timm(arrays, small_encoder(), "there")
    found = to_timm(read(written(tmp_path / "other.npz", change(arrays))), small_encoder(), "there")
    assert set(found) == set(usual)
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_vectors_of_group_norms_may_have_four_axes():
    arrays = filled(hybrid_shapes((1, 1), width=24, heads=3, depth=1, entries=17))
    backbone = timm.models.ResNetV2((1, 1), num_classes=0, global_pool="", preact=False, stem_type="same")
    encoder = timm.models.VisionTransformer(
        img_size=32,
        patch_size=1,
        embed_dim=24,
        depth=1,
        num_heads=3,
        num_classes=0,
        embed_layer=lambda **more: timm.layers.HybridEmbed(backbone, **more),
    )
    usual = to_timm(arrays, encoder, "there")
    four = {
        n: a.reshape(1, 1, 1, -1) if n.split("/")[-2].startswith("gn") else a for n, a in arrays.items() if "/" in n
    }
    assert sum(array.ndim == 4 for array in four.values()) > sum(array.ndim == 4 for array in arrays.values())
    found = to_timm({**arrays, **four}, encoder, "there")
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def test_bfloat16_is_read_exactly(tmp_path):
    arrays = {name: torch.from_numpy(array).bfloat16() for name, array in small_arrays().items()}
    path = written(tmp_path / "half.npz", {n: a.view(torch.int16).numpy().view("V2") for n, a in arrays.items()})
    for name, array in read(path).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, arrays[name].float().numpy())


def test_positions_of_another_grid_are_left_to_the_caller():
    arrays = small_arrays()
    arrays["Transformer/posembed_input/pos_embedding"] = table = np.random.rand(1, 37, 24).astype(np.float32)
    np.testing.assert_array_equal(to_timm(arrays, small_encoder(), "there")["pos_embed"].numpy(), table)
    for shape in [(1, 36, 24), (1, 39, 24), (1, 37, 20), (2, 37, 24), (37, 24), (1, 37, 24, 1), (1, 0, 24)]:
        arrays["Transformer/posembed_input/pos_embedding"] = np.zeros(shape, np.float32)
        if shape == (1, 36, 24):  # a square without the class entry
            assert to_timm(arrays, small_encoder(), "there")["pos_embed"].shape == (1, 37, 24)
            continue
        with pytest.raises(UserError) as refusal:
            to_timm(arrays, small_encoder(), "there")
        line = f"shape of Transformer/posembed_input/pos_embedding: {list(shape)} there, [1, 17, 24] in the model"
        assert str(refusal.value).splitlines()[1:] == [f"  {line}"]


def test_positions_of_big_vision_add_nothing_to_the_class_token():
    arrays = renumbered(small_arrays())
    table = arrays.pop("Transformer/posembed_input/pos_embedding")[:, 1:]
    arrays["pos_embedding"] = table
    found = to_timm(arrays, small_encoder(), "there")
    assert found["pos_embed"].shape == (1, 17, 24) and not found["pos_embed"][:, 0].any()
    np.testing.assert_array_equal(found["pos_embed"][:, 1:].numpy(), table)
    # timm has a model whose class token gets no entry, which is the same function
    theirs, ours = small_encoder(no_embed_class=True).eval(), small_encoder().eval()
    theirs.load_state_dict({n: v for n, v in to_timm(arrays, theirs, "there").items() if "head" not in n})
    ours.load_state_dict({n: v for n, v in found.items() if "head" not in n})
    assert theirs.pos_embed.shape == (1, 16, 24)
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.forward_features(image), theirs.forward_features(image))


def test_an_encoder_without_a_class_token():
    encoder = small_encoder(global_pool="avg", class_token=False, fc_norm=False)
    arrays = small_arrays()
    arrays["Transformer/posembed_input/pos_embedding"] = arrays["Transformer/posembed_input/pos_embedding"][:, 1:]
    with pytest.raises(UserError) as refusal:
        to_timm(arrays, encoder, "there")
    assert str(refusal.value).splitlines()[1:] == ["  unexpected: cls"]
    del arrays["cls"]
    assert set(encoder.state_dict()) <= set(to_timm(arrays, encoder, "there"))


def test_each_misfit_is_named_in_one_message():
    arrays = small_arrays()
    del arrays["Transformer/encoderblock_1/MultiHeadDotProductAttention_1/key/kernel"]
    arrays["embedding/kernel"] = np.zeros((4, 4, 3, 24), np.float32)
    arrays["Transformer/encoderblock_0/MultiHeadDotProductAttention_1/value/bias"] = np.zeros((2, 12), np.float32)
    arrays["Transformer/encoderblock_0/MultiHeadDotProductAttention_1/out/kernel"] = np.zeros((2, 12, 24), np.float32)
    arrays["Transformer/encoderblock_2/LayerNorm_0/scale"] = np.zeros(24, np.float32)
    arrays["head/kernel"] = np.zeros(5, np.float32)
    with pytest.raises(UserError) as refusal:
        to_timm(arrays, small_encoder(), "weights.npz")
    first, *lines = str(refusal.value).splitlines()
    assert first.startswith("init=weights.npz does not fit the model of this recipe; nothing was loaded.")
    attention = "Transformer/encoderblock_{}/MultiHeadDotProductAttention_1"
    assert sorted(line.strip() for line in lines) == sorted(
        [
            f"missing: {attention.format(1)}/key/kernel (blocks.1.attn.qkv.weight)",
            "shape of embedding/kernel: [4, 4, 3, 24] there, [8, 8, 3, 24] in the model",
            f"shape of {attention.format(0)}/value/bias: [2, 12] there, [3, 8] in the model",
            f"shape of {attention.format(0)}/out/kernel: [2, 12, 24] there, [3, 8, 24] in the model",
            "unexpected: Transformer/encoderblock_2/LayerNorm_0/scale",
            "unexpected: head/kernel",
        ]
    )


def test_misfits_are_named_as_the_file_spells_them():
    arrays = renumbered(small_arrays())
    arrays["pos_embedding"] = arrays.pop("Transformer/posembed_input/pos_embedding")[:, :3]
    del arrays["Transformer/encoderblock_1/LayerNorm_1/scale"]
    with pytest.raises(UserError) as refusal:
        to_timm(arrays, small_encoder(), "there")
    assert sorted(str(refusal.value).splitlines()[1:]) == [
        "  missing: Transformer/encoderblock_1/LayerNorm_1/scale (blocks.1.norm2.weight)",
        "  shape of pos_embedding: [1, 3, 24] there, [1, 17, 24] in the model",
    ]


def test_what_the_files_have_no_place_for_is_missing():
    with pytest.raises(UserError) as refusal:
        to_timm(small_arrays(), small_encoder(init_values=1e-5, reg_tokens=1, pos_embed="none"), "there")
    lines = [line.strip() for line in str(refusal.value).splitlines()[1:]]
    assert "missing: blocks.1.ls2.gamma (no official array)" in lines
    assert "missing: reg_token (no official array)" in lines
    assert "unexpected: Transformer/posembed_input/pos_embedding" in lines
    assert len(lines) == 4 + 1 + 1
    arrays = small_arrays() | {"pos_embedding": np.zeros((1, 16, 24), np.float32)}
    with pytest.raises(UserError, match=r"shape of pos_embedding: \[1, 16, 24\] there, \[1, 18, 24\] in the model"):
        to_timm(arrays, small_encoder(reg_tokens=1), "there")
    encoder = small_encoder()
    encoder.blocks[0].attn.relative = torch.nn.Parameter(torch.zeros(33, 8))
    with pytest.raises(UserError, match=r"missing: blocks.0.attn.relative \(no official array\)"):
        to_timm(small_arrays(), encoder, "there")


def test_weights_of_another_family_are_refused(tmp_path):
    with torch.device("meta"):
        encoder = timm.create_model("resnetv2_50x1_bit", num_classes=0)
    with pytest.raises(UserError) as refusal:
        to_timm(small_arrays(), encoder, "there")
    message = str(refusal.value)
    assert "missing: resnet/block4/unit03/c/group_norm/gamma (stages.3.blocks.2.norm3.weight)" in message
    assert "missing: resnet/block1/unit01/a/proj/standardized_conv2d/kernel (stages.0.blocks.0.downsample" in message
    assert "unexpected: cls" in message


def test_files_that_are_not_such_weights(tmp_path):
    whole = written(tmp_path / "whole.npz", small_arrays(head=None)).read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", cls=np.array([{}], dtype=object))
    np.savez(tmp_path / "integers.npz", **{"embedding/kernel": np.arange(3)})
    torch.save({"cls": torch.zeros(3)}, tmp_path / "torch.pt")
    inside = whole.index(b"NUMPY") + 3000
    contents = {
        "pickle.npz": pickle.dumps({"cls": 1}),
        "empty.npz": b"",
        "text.npz": b"not weights\n" * 100,
        "cut.npz": whole[: len(whole) // 2],
        "flipped.npz": whole[:inside] + bytes([whole[inside] ^ 1]) + whole[inside + 1 :],
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.npz").mkdir()
    words = {"absent.npz": "no such file", "integers.npz": "embedding/kernel holds int64, not floats"}
    words |= {"objects.npz": "Object arrays", "torch.pt": "is no array", "one.npy": "one array without a name"}
    for name in [*contents, *words, "folder.npz"]:
        with pytest.raises(UserError) as refusal:
            read(tmp_path / name)
        assert str(refusal.value).startswith(f"init={tmp_path / name}: "), name
        assert words.get(name, "damaged") in str(refusal.value), name


def test_a_fixed_table_need_not_stand_in_the_file():
    arrays = small_arrays()
    del arrays["Transformer/posembed_input/pos_embedding"]
    encoder = small_encoder()
    with pytest.raises(UserError, match="missing: Transformer/posembed_input/pos_embedding"):
        to_timm(arrays, encoder, "there")
    encoder.pos_embed.requires_grad_(False)
    assert torch.equal(to_timm(arrays, encoder, "there")["pos_embed"], encoder.pos_embed)
