"""mpp/decoding.py: odd files against other libraries, and one decoder against the other."""

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import skimage
import sklearn
import tifffile
import torch
import torchvision
from conftest import picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from mpp import decoding
from mpp.errors import ImageError, UserError

SKIMAGE, SKLEARN = Path(skimage.__file__).parent / "data", Path(sklearn.__file__).parent / "datasets" / "images"
PHOTOGRAPHS = [SKIMAGE / "rocket.jpg", SKIMAGE / "retina.jpg", SKLEARN / "china.jpg", SKLEARN / "flower.jpg"]


def saved(image, **options):
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def chelsea():
    return Image.open(SKIMAGE / "chelsea.png").convert("RGB")


def whole(encoded, name="a file"):
    """All pixels as a run would see them."""
    found = decoding.open_picture(encoded, name)
    return found.region((0, 0, found.width, found.height))


def turned(orientation, image=None, **options):
    image = image or chelsea()
    exif = image.getexif()
    exif[0x0112] = orientation
    return saved(image, format="JPEG", exif=exif, **options)


# ---- odd files against torchvision (libpng, giflib, libwebp) and tifffile


def decode_image(raw, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its decoders are to leave torchvision one day
        return torchvision.io.decode_image(raw, **options)


def by_torchvision(encoded, **options):
    raw = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    pixels = decode_image(raw, mode="RGB", **options).numpy()
    pixels = pixels[0] if pixels.ndim == 4 else pixels  # the first frame
    return (pixels >> 8 if pixels.dtype == np.uint16 else pixels).transpose(1, 2, 0)


def over_white(encoded):
    raw = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    pixels = decode_image(raw, mode="RGB_ALPHA").numpy().transpose(1, 2, 0).astype(float)
    alpha = pixels[..., 3:] / 255
    return pixels[..., :3] * alpha + 255 * (1 - alpha)


def by_tifffile(encoded):
    pixels = tifffile.imread(io.BytesIO(encoded), key=0)
    return np.repeat(pixels[..., None], 3, -1) if pixels.ndim == 2 else pixels


def soft_edge(image):
    image = image.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def sixteen_bits(mode):
    ramp = np.arange(60 * 80, dtype=np.uint16).reshape(60, 80) * 13
    if mode == "grey":
        return saved(Image.fromarray(ramp), format="PNG")
    file = io.BytesIO()
    torch_pixels = torch.from_numpy(np.stack([ramp, ramp[::-1], ramp.T.reshape(60, 80)]).astype(np.int32)).to(
        torch.uint16
    )
    tifffile.imwrite(file, torch_pixels.numpy().transpose(1, 2, 0), photometric="rgb")
    return file.getvalue()


ODD = {
    "grey PNG": (lambda: (SKIMAGE / "camera.png").read_bytes(), by_torchvision, 0),
    "grey PNG of 1 bit": (lambda: saved(chelsea().convert("1"), format="PNG"), by_torchvision, 0),
    "RGBA PNG": (lambda: (SKIMAGE / "logo.png").read_bytes(), over_white, 1),
    "RGBA PNG with a soft edge": (lambda: saved(soft_edge(chelsea()), format="PNG"), over_white, 1),
    "grey PNG with alpha": (lambda: saved(soft_edge(chelsea()).convert("LA"), format="PNG"), over_white, 1),
    "palette PNG": (lambda: saved(chelsea().quantize(64), format="PNG"), by_torchvision, 0),
    "palette PNG with a transparent colour": (
        lambda: saved(chelsea().quantize(64), format="PNG", transparency=3),
        over_white,
        1,
    ),
    "16-bit grey PNG": (lambda: sixteen_bits("grey"), by_torchvision, 0),
    "16-bit RGB TIFF": (lambda: sixteen_bits("rgb"), lambda encoded: by_tifffile(encoded) >> 8, 0),
    "TIFF of several pages": (
        lambda: saved(chelsea(), format="TIFF", save_all=True, append_images=[chelsea().rotate(90)]),
        by_tifffile,
        0,
    ),
    "animated GIF": (lambda: (SKIMAGE / "no_time_for_that_tiny.gif").read_bytes(), by_torchvision, 0),
    "WebP": (lambda: saved(chelsea(), format="WEBP", quality=80), by_torchvision, 0),
    "WebP without loss": (lambda: saved(chelsea(), format="WEBP", lossless=True), by_torchvision, 0),
    "CMYK JPEG": (lambda: saved(chelsea().convert("CMYK"), format="JPEG", quality=95), by_torchvision, 1),
    "grey JPEG": (lambda: saved(chelsea().convert("L"), format="JPEG"), by_torchvision, 0),
    "progressive JPEG": (lambda: saved(chelsea(), format="JPEG", progressive=True), by_torchvision, 0),
    "JPEG of 4:4:4": (lambda: saved(chelsea(), format="JPEG", subsampling=0), by_torchvision, 0),
    "JPEG of 4:2:2": (lambda: saved(chelsea(), format="JPEG", subsampling=1), by_torchvision, 0),
    "JPEG in RGB": (lambda: saved(chelsea(), format="JPEG", keep_rgb=True), by_torchvision, 0),
    "JPEG with restarts": (lambda: saved(chelsea(), format="JPEG", restart_marker_blocks=5), by_torchvision, 0),
    **{
        f"JPEG of orientation {turn}": (
            lambda turn=turn: turned(turn),
            lambda encoded: by_torchvision(encoded, apply_exif_orientation=True),
            0,
        )
        for turn in range(1, 9)
    },
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_files_against_a_second_library(kind):
    make, read, tolerance = ODD[kind]
    encoded = make()
    found, expected = whole(encoded), read(encoded)
    assert found.shape == expected.shape and found.dtype == np.uint8
    assert np.abs(found - expected.astype(float)).max() <= tolerance
    assert found.std() > 1  # a picture, and not a plane


def test_transparent_is_white():
    for mode, color in (("RGBA", (9, 9, 9, 0)), ("LA", (9, 0))):
        found = whole(saved(Image.new(mode, (8, 6), color), format="PNG"))
        assert found.shape == (6, 8, 3) and (found == 255).all()


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_of_unknown_range_are_refused(mode):
    with pytest.raises(UserError, match="32-bit pixels have no known range"):
        whole(saved(Image.new(mode, (4, 4)), format="TIFF"))


# ---- metadata


def test_malformed_metadata_does_not_cost_an_image():
    info = PngImagePlugin.PngInfo()  # an XMP block that is not UTF-8, with the checksum that belongs to it
    info.add(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta>\xff\xfe\xba\xad</x:xmpmeta>")
    exif = b"Exif\x00\x00MM\x00\x2a\x00\x00\x00\x08\x00\x01\x01\x12\x00\x05\x00\x00\x00\x01\x00\x00\xff\xff"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whole(saved(picture(), format="PNG", pnginfo=info)).shape == (30, 40, 3)
        assert whole(saved(picture(), format="JPEG", exif=exif)).shape == (30, 40, 3)


def test_an_orientation_in_xmp_alone_is_seen_by_both_decoders():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><r tiff:Orientation="6"/></x:xmpmeta>'
    encoded = saved(chelsea(), format="JPEG", xmp=xmp)
    assert whole(encoded).shape == decoding.decode_whole(encoded, "a file").array.shape


# ---- one decoder against the other


fast = pytest.mark.skipif(not decoding.decodes_jpeg_in_part(), reason="nvImageCodec is not installed")


@fast
@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, len(PHOTOGRAPHS) - 1),
    shape=st.sampled_from([(400, 300), (401, 299), (97, 33), (16, 16), (17, 1)]),
    quality=st.integers(20, 98),
    subsampling=st.integers(0, 2),
    progressive=st.booleans(),
    grey=st.booleans(),
    corners=st.tuples(*[st.floats(0, 1)] * 4),
)
def test_a_region_is_what_pillow_shows_there(which, shape, quality, subsampling, progressive, grey, corners):
    image = Image.open(PHOTOGRAPHS[which]).convert("L" if grey else "RGB").crop((30, 20, 30 + shape[0], 20 + shape[1]))
    encoded = saved(image, format="JPEG", quality=quality, subsampling=subsampling, progressive=progressive)
    left, right = sorted(round(share * shape[0]) for share in corners[:2])
    top, bottom = sorted(round(share * shape[1]) for share in corners[2:])
    left, top = min(left, shape[0] - 1), min(top, shape[1] - 1)
    box = (left, top, max(right, left + 1), max(bottom, top + 1))
    found = decoding.open_picture(encoded, "a file")
    assert isinstance(found, decoding._Jpeg) and (found.width, found.height) == shape
    expected = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB").crop(box))
    assert np.array_equal(found.region(box), expected)


@fast
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_every_alignment_to_the_blocks_gives_pillows_pixels(subsampling):
    encoded = saved(Image.open(PHOTOGRAPHS[0]).crop((30, 20, 130, 100)), format="JPEG", subsampling=subsampling)
    expected = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))
    found = decoding.open_picture(encoded, "a file")
    assert isinstance(found, decoding._Jpeg)
    for left in range(34):
        for width in (1, 2, 15, 16, 17, 18, 31, 32, 33, 66):
            box = (left, left, left + width, left + 40 + width % 7)
            there = expected[box[1] : box[3], box[0] : box[2]]
            assert np.array_equal(found.region(box), there), box


@fast
@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4), cut=st.booleans())
def test_a_damaged_jpeg_is_the_same_to_both_or_refused(places, cut):
    encoded = bytearray(saved(Image.open(PHOTOGRAPHS[0]).crop((0, 100, 200, 260)), format="JPEG"))
    start = encoded.find(b"\xff\xda") + 14
    for share, value in places:
        encoded[start + int(share * (len(encoded) - start - 1))] = value
    encoded = bytes(encoded[: len(encoded) // 2] if cut else encoded)
    try:
        expected = decoding.decode_whole(encoded, "a file").array
    except ImageError:
        expected = None
    try:
        found = whole(encoded)
    except ImageError:
        found = None
    assert (found is None) == (expected is None or cut)  # never half an image in grey
    assert found is None or np.array_equal(found, expected)


@fast
def test_a_marker_within_the_pixels_is_damage():
    # The byte after one 0xff is set, which libjpeg takes for the end of what it can decode: the rest is grey to it.
    encoded = bytearray(saved(Image.open(PHOTOGRAPHS[0]).crop((0, 100, 200, 260)), format="JPEG"))
    at = encoded.find(b"\xff\x00", len(encoded) // 2)
    encoded[at + 1] = 0x83
    assert isinstance(decoding.open_picture(saved(chelsea(), format="JPEG"), "a file"), decoding._Jpeg)
    with pytest.raises(ImageError, match="a file can't be read as an image: broken data stream"):
        decoding.open_picture(bytes(encoded), "a file").region((0, 0, 200, 160))


@fast
def test_a_thumbnail_in_the_metadata_is_not_taken_for_the_image():
    thumbnail = saved(chelsea().resize((64, 48)), format="JPEG")
    exif = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail
    encoded = saved(chelsea(), format="JPEG", exif=exif)
    assert encoded.count(b"\xff\xda") == 2
    found = decoding.open_picture(encoded, "a file")
    assert isinstance(found, decoding._Jpeg) and (found.width, found.height) == (451, 300)
    assert np.array_equal(found.region((0, 0, 451, 300)), decoding.decode_whole(encoded, "a file").array)


def test_a_cut_file_is_refused_even_where_the_crop_is_whole():
    encoded = Path(PHOTOGRAPHS[0]).read_bytes()
    for part in (encoded[: len(encoded) // 2], encoded[:-2]):
        with pytest.raises(ImageError, match=r"cut\.jpg can't be read as an image: .*; repair or remove it"):
            decoding.open_picture(part, "cut.jpg").region((0, 0, 8, 8))


@pytest.mark.parametrize(
    ("encoded", "words"),
    [
        (b"", "it is empty"),
        (b"not an image", "its format is not known"),
        (b"\xff\xd8\xff\xd9", "its format is not known"),
    ],
)
def test_what_is_no_image_is_named(encoded, words):
    with pytest.raises(ImageError, match=rf"row 3 can't be read as an image: {words}; repair or remove it"):
        decoding.open_picture(encoded, "row 3")


def test_a_decompression_bomb_is_refused_by_its_header():
    # 30,000 x 30,000 pixels by the header, of which nothing follows.
    png = saved(Image.new("L", (8, 8)), format="PNG")
    import struct
    import zlib

    header = struct.pack(">II", 30_000, 30_000) + png[24:29]
    png = png[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + png[33:]
    jpeg = bytearray(saved(picture(), format="JPEG"))
    at = jpeg.find(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 30_000, 30_000)
    for encoded in (png, bytes(jpeg)):
        with pytest.raises(ImageError, match="decompression bomb"):
            whole(encoded)


def test_without_the_fast_decoder_the_pixels_are_the_same():
    # A module of None in sys.modules is one that can't be imported.
    script = (
        "import sys; sys.modules['nvidia.nvimgcodec'] = None\n"
        "from mpp import decoding\n"
        f"picture = decoding.open_picture(open({str(PHOTOGRAPHS[2])!r}, 'rb').read(), 'a file')\n"
        "assert isinstance(picture, decoding.Pixels) and not decoding.decodes_jpeg_in_part()\n"
        "sys.stdout.buffer.write(picture.region((50, 60, 300, 200)).tobytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    here = decoding.open_picture(PHOTOGRAPHS[2].read_bytes(), "a file").region((50, 60, 300, 200))
    assert done.stdout == here.tobytes()


@fast
def test_a_forked_worker_decodes_by_itself():
    encoded = PHOTOGRAPHS[0].read_bytes()
    before = decoding.open_picture(encoded, "a file").region((0, 0, 64, 64))
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        found = decoding.open_picture(encoded, "a file").region((0, 0, 64, 64))
        os.write(write, b"same" if np.array_equal(found, before) else b"other")
        os._exit(0)
    os.waitpid(worker, 0)
    assert os.read(read, 5) == b"same"


def test_the_library_says_nothing_about_missing_gpu_codecs():
    done = subprocess.run(
        [sys.executable, "-c", "from mpp import decoding; decoding.decodes_jpeg_in_part()"],
        capture_output=True,
        check=True,
    )
    assert done.stderr == b"" and done.stdout == b""


# ---- resize, mirror


@settings(deadline=None, max_examples=40)
@given(shape=st.tuples(st.integers(1, 90), st.integers(1, 90)), size=st.tuples(st.integers(1, 70), st.integers(1, 70)))
def test_resize_is_pillows_bilinear(shape, size):
    pixels = np.random.default_rng(shape[0]).integers(0, 256, (*shape, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(decoding.resize(pixels, *size) - expected).max() <= 1


def test_mirror_against_numpy():
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(decoding.mirror(pixels), pixels[:, ::-1])
