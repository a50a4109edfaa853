"""From an encoded image to RGB pixels: as much of it as a crop needs, and the resize.

Two decoders, one result. nvImageCodec decodes JPEG: libjpeg-turbo, but only the rows and blocks of the
region that is asked for. Pillow, which is built on libjpeg-turbo too, decodes everything else: other
formats, turned and CMYK JPEGs, files that do not end as a JPEG must, and every JPEG where nvImageCodec
is not installed. Both give the same pixels, bit for bit (tests/test_decoding.py).
"""

import io
import os
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from mpp.errors import ImageError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")

Box = tuple[int, int, int, int]  # left, top, right, bottom

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 0)  # where Pillow, too, refuses a decompression bomb
ORIENTATION = 0x0112  # the EXIF tag
# Within the pixels of a JPEG: what is no restart, and, where there are several scans, starts none of them.
_MARKERS = re.compile(rb"\xff[^\x00\xd0-\xd7]")
_PROGRESSIVE_MARKERS = re.compile(rb"\xff[^\x00\xd0-\xd7\xc4\xda]")
_NARROW = 16  # pixels; libjpeg-turbo interpolates the colours of a region of one column otherwise than of the whole


class Picture(Protocol):
    """An image, perhaps not decoded yet."""

    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...

    def region(self, box: Box) -> np.ndarray:
        """Pixels inside (left, top, right, bottom): uint8 [height, width, 3]; raises ImageError."""


@dataclass(frozen=True)
class Pixels:
    """An image that is decoded, uint8 [height, width, 3]."""

    array: np.ndarray

    @property
    def width(self) -> int:
        return self.array.shape[1]

    @property
    def height(self) -> int:
        return self.array.shape[0]

    def region(self, box: Box) -> np.ndarray:
        left, top, right, bottom = box
        return np.ascontiguousarray(self.array[top:bottom, left:right])


@dataclass(frozen=True)
class _Jpeg:
    """A JPEG of which only a region will be decoded."""

    encoded: bytes
    name: str
    stream: Any

    @property
    def width(self) -> int:
        return self.stream.width

    @property
    def height(self) -> int:
        return self.stream.height

    def region(self, box: Box) -> np.ndarray:
        left, top, right, bottom = box
        if right - left < _NARROW:
            return decode_whole(self.encoded, self.name).region(box)
        library, decoder, parameters = _jpeg_decoder(os.getpid())
        part = self.stream.get_sub_code_stream(region=library.Region(top, left, bottom, right))
        try:
            decoded = decoder.decode(part, params=parameters)
        except Exception:
            decoded = None
        if decoded is None:  # Pillow decides, and says why
            return decode_whole(self.encoded, self.name).region(box)
        return np.asarray(decoded)


def open_picture(encoded: bytes, name: str) -> Picture:
    """An encoded image, ready to give its pixels.

    Args:
        name: of the file or row, for messages.

    Raises:
        ImageError: it can't be read, naming it; some damage shows only when the pixels are asked for.
    """
    if _decodes_in_part(encoded):
        library, _, _ = _jpeg_decoder(os.getpid())
        try:
            stream = library.CodeStream(encoded)
            plain = stream.num_channels in (1, 3) and str(stream.dtype) == "uint8"
            if plain and stream.width * stream.height <= MAX_PIXELS:
                return _Jpeg(encoded, name, stream)
        except Exception:  # of many kinds, for a file that it does not understand; Pillow decides
            pass
    return decode_whole(encoded, name)


def decode_whole(encoded: bytes, name: str) -> Pixels:
    """All pixels of an encoded image, by Pillow; raises ImageError naming it."""
    if not encoded:
        raise ImageError(f"{name} can't be read as an image: it is empty; repair or remove it")
    return Pixels(np.array(read_rgb(io.BytesIO(encoded), name)))


def read_rgb(file: Path | io.BytesIO, name: str) -> Image.Image:
    """A picture in RGB, by Pillow; raises ImageError naming it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # malformed metadata that the pixels do not need
            with Image.open(file) as picture:
                picture.load()
                return to_rgb(picture)
    except UnidentifiedImageError:
        raise ImageError(f"{name} can't be read as an image: its format is not known; repair or remove it") from None
    except MemoryError:
        raise
    except Exception as error:  # damage makes Pillow raise nearly every kind there is
        reason = str(error) or type(error).__name__
        raise ImageError(f"{name} can't be read as an image: {reason}; repair or remove it") from None


def to_rgb(picture: Image.Image) -> Image.Image:
    """The picture as it is meant to be seen, in 8-bit RGB.

    EXIF orientation is applied, unless the metadata is malformed; 16-bit samples keep their upper byte;
    transparency is laid over white; an animation gives its first frame; colour profiles are not applied.
    Raises ValueError where the range of the pixels is not known.
    """
    try:
        picture = ImageOps.exif_transpose(picture)
    except Exception:  # Pillow raises many kinds on malformed metadata, none of which spoils the pixels
        pass
    if picture.mode in ("I", "F"):
        raise ValueError("its 32-bit pixels have no known range; save it with 8 or 16 bits")
    if picture.mode.startswith("I;16"):
        picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture.convert("RGB")


def resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resized by a triangle filter that is as wide as the shrinking asks for, as Pillow's bilinear is.

    Args:
        pixels: uint8 [height, width, 3].

    Returns:
        uint8 [height, width, 3].
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    # In this order of strides torch sees channels that lie side by side, and neither takes them apart nor joins them.
    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1)[0].contiguous().numpy()


def mirror(pixels: np.ndarray) -> np.ndarray:
    """Left and right exchanged; uint8 [height, width, channel]."""
    return torch.from_numpy(pixels).flip(1).numpy()  # NumPy takes ten times as long to copy a reversed view


def decodes_jpeg_in_part() -> bool:
    """Whether nvImageCodec is installed; without it the pixels are the same, at half the speed."""
    return _library() is not None


def _decodes_in_part(encoded: bytes) -> bool:
    """Whether this is a JPEG without visible damage, which is not turned.

    A file that was cut has no end marker, and a damaged one may have a marker in the middle. A decoder that
    needs only some rows would see neither, or give grey for what is lost. Pillow decides about such a file.
    """
    if not encoded.startswith(b"\xff\xd8\xff") or not encoded.endswith(b"\xff\xd9"):
        return False
    at, markers, described = 2, _MARKERS, False
    while (kind := encoded[at + 1]) != 0xDA:  # the segments before the pixels, each with its length
        length = int.from_bytes(encoded[at + 2 : at + 4], "big")
        if encoded[at] != 0xFF or at + length + 4 > len(encoded):
            return False
        markers = _PROGRESSIVE_MARKERS if kind == 0xC2 else markers
        described = described or kind == 0xE1  # EXIF or XMP
        at += 2 + length
    end = markers.search(encoded, at + 2)
    if end is None or end.start() != len(encoded) - 2:
        return False
    if described:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if Image.open(io.BytesIO(encoded)).getexif().get(ORIENTATION, 1) != 1:
                    return False
        except Exception:  # malformed; Pillow decides
            return False
    return decodes_jpeg_in_part()


@lru_cache(maxsize=1)
def _library() -> Any:
    """nvImageCodec, or None where it is not installed."""
    silent, errors = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(silent, 2)  # it complains there of GPU codecs that are not installed, and not needed
    try:
        from nvidia import nvimgcodec
    except ImportError:
        return None
    finally:
        os.dup2(errors, 2)
        os.close(errors)
        os.close(silent)
    return nvimgcodec


@lru_cache(maxsize=1)
def _jpeg_decoder(process: int) -> tuple[Any, Any, Any]:
    """The library, a decoder of this process, which a forked worker does not share, and its parameters."""
    library = _library()
    decoder = library.Decoder(
        device_id=library.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[library.Backend(library.CPU_ONLY)],
    )
    return library, decoder, library.DecodeParams(apply_exif_orientation=False)
