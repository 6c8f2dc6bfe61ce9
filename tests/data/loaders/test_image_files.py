"""Images in files: what every mode that Pillow reads comes to, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lit_fed.data import ClientFolders
from lit_fed.data.loaders.image_files import ImageFiles, image_size, read_image
from lit_fed.errors import ConfigError
from lit_fed.poses.data.files import _Reader

GREY = np.array([[0, 51], [102, 255]], dtype=np.uint8)
"""A picture of four pixels: 0, 1/5, 2/5 and 1 of white."""
OPAQUE = np.full_like(GREY, 255)


def _rgba(alpha: np.ndarray) -> Image.Image:
    return Image.fromarray(np.stack([GREY, GREY, GREY, alpha], axis=2), "RGBA")


def _palette(transparency: int | bytes | None = None) -> Image.Image:
    """Indices 0 to 3 of a palette that has the picture's greys in another order."""
    image = Image.fromarray(np.array([[3, 1], [0, 2]], dtype=np.uint8), "P")
    image.putpalette([grey for grey in (102, 51, 255, 0) for _ in "RGB"] + [7] * (252 * 3))
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def _big_endian() -> Image.Image:
    wide = (GREY.astype(np.uint16) * 257).astype(">u2")
    return Image.frombytes("I;16B", (2, 2), wide.tobytes())


# The same picture: 16 bits hold v·257 for a byte v (255·257 = 65535), floating point v/255, 31 bits v·(2³¹ − 1)/255.
WIDE = GREY.astype(np.uint16) * 257
SAME: dict[str, tuple[str, Any]] = {
    "L.png": ("L", lambda: Image.fromarray(GREY)),
    "L.bmp": ("L", lambda: Image.fromarray(GREY)),
    "L.tif": ("L", lambda: Image.fromarray(GREY)),
    "L.pgm": ("L", lambda: Image.fromarray(GREY)),
    "LA.png": ("LA", lambda: Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(OPAQUE)))),
    "LA.tif": ("LA", lambda: Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(OPAQUE)))),
    "P.png": ("P", _palette),
    "P.gif": ("P", _palette),
    "P.bmp": ("P", _palette),
    "opaque-P.png": ("P", lambda: _palette(bytes([255] * 4))),
    "unused-key-P.png": ("P", lambda: _palette(9)),
    "RGB.png": ("RGB", lambda: Image.fromarray(GREY).convert("RGB")),
    "RGB.webp": ("RGB", lambda: Image.fromarray(GREY).convert("RGB")),
    "RGBA.png": ("RGBA", lambda: _rgba(OPAQUE)),
    "RGBA.tiff": ("RGBA", lambda: _rgba(OPAQUE)),
    "CMYK.tif": ("CMYK", lambda: Image.fromarray(GREY).convert("RGB").convert("CMYK")),
    "16.png": ("I;16", lambda: Image.fromarray(WIDE)),
    "16.tif": ("I;16", lambda: Image.fromarray(WIDE)),
    "16.pgm": ("I", lambda: Image.fromarray(WIDE.astype(np.int32))),
    "16-big-endian.tif": ("I;16B", _big_endian),
    "31.tif": ("I", lambda: Image.fromarray((GREY / 255 * (2**31 - 1)).astype(np.int32))),
    "F.tif": ("F", lambda: Image.fromarray((GREY / 255).astype(np.float32))),
}


@pytest.mark.parametrize("name", SAME)
def test_a_picture_has_the_same_values_in_every_mode(name: str, tmp_path: Path) -> None:
    mode, make = SAME[name]
    options = {"lossless": True} if name.endswith("webp") else {}
    make().save(tmp_path / name, **options)
    with Image.open(tmp_path / name) as stored:
        # Pillow before 10.3 read PNG files of 16 bits as I.
        assert stored.mode == mode or (name, stored.mode) == ("16.png", "I")
    grey, colour = (read_image(tmp_path / name, grayscale) for grayscale in (True, False))
    assert (grey.shape, colour.shape) == ((2, 2, 1), (2, 2, 3))
    assert grey.dtype == colour.dtype == (np.float32 if name[0].isdigit() or mode == "F" else np.uint8)
    # 31 bits: v·(2³¹ − 1)/255 is cut to a whole number, which is off by 255/2³¹ at most.
    # Floating point: v/255 has 24 bits.
    tolerance = {"31.tif": 2e-7, "F.tif": 2e-5}.get(name, 0)
    assert np.abs(grey[..., 0] - GREY.astype(np.float32)).max() <= tolerance
    assert np.abs(colour - GREY[..., None].astype(np.float32)).max() <= tolerance


def test_a_photograph_of_three_colours_in_ycbcr_is_what_it_was_up_to_jpegs_loss(tmp_path: Path) -> None:
    red = np.zeros((16, 16, 3), dtype=np.uint8)
    red[..., 0] = 200
    Image.fromarray(red).save(tmp_path / "rgb.jpg", quality=100, subsampling=0)
    Image.fromarray(red).convert("YCbCr").save(tmp_path / "ycbcr.tif", compression="jpeg", quality=100)
    for name in ("rgb.jpg", "ycbcr.tif"):
        assert np.abs(read_image(tmp_path / name, grayscale=False).astype(int) - red).max() <= 6


def test_what_lies_between_two_bytes_is_kept(tmp_path: Path) -> None:
    Image.fromarray(np.array([[1, 257, 300]], dtype=np.uint16)).save(tmp_path / "fine.png")
    assert read_image(tmp_path / "fine.png", grayscale=True)[0, :, 0] == pytest.approx([1 / 257, 1, 300 / 257])


def test_twelve_bits_of_a_tiff_are_twelve(tmp_path: Path) -> None:
    # 0xFFF is white, 0x333 = 819 is 1/5 of it, which a byte has as 51; two pixels a row are three bytes: FF F3 33.
    Image.frombytes("L", (3, 1), b"\xff\xf3\x33").save(tmp_path / "12.tif")
    content = bytearray((tmp_path / "12.tif").read_bytes())
    for tag, value in ((256, 2), (258, 12)):  # width, bits: type SHORT, so that the value is where a directory has it
        entry = content.index(
            tag.to_bytes(2, "little") + b"\x03\x00" if tag == 258 else tag.to_bytes(2, "little") + b"\x04\x00"
        )
        content[entry + 8 : entry + 10] = value.to_bytes(2, "little")
    (tmp_path / "12.tif").write_bytes(content)
    with Image.open(tmp_path / "12.tif") as stored:
        assert stored.mode == "I;16"
    assert read_image(tmp_path / "12.tif", grayscale=True)[0, :, 0] == pytest.approx([255, 51])


def turned(path: Path, pixels: np.ndarray, orientation: int) -> Path:
    """A file of stored pixels with an EXIF orientation."""
    exif = Image.Exif()
    exif[274] = orientation
    options = {"lossless": True} if path.suffix == ".webp" else {"quality": 100} if path.suffix == ".jpg" else {}
    Image.fromarray(pixels).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "deep.png", "deep.tif"])
def test_an_image_is_upright_as_its_exif_data_say(tmp_path: Path, name: str, orientation: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3), dtype=np.uint8)
    stored = pixels.astype(np.uint16) * 257 if name.startswith("deep") else np.repeat(pixels[..., None], 3, axis=2)
    path = turned(tmp_path / name, stored, orientation)
    with open(path, "rb") as stream, Image.open(stream) as file:  # by its name, Pillow 13 scrambles deep.tif
        wanted = np.array(ImageOps.exif_transpose(file))
    assert wanted.shape[:2] == ((3, 5) if orientation > 4 else (5, 3))
    found = read_image(path, grayscale=name.startswith("deep"))
    assert found.flags.c_contiguous
    assert np.array_equal(found[..., 0], wanted / 257) if wanted.ndim == 2 else np.array_equal(found, wanted)
    assert image_size(path) == wanted.shape[1::-1]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_folders_of_images_are_upright(tmp_path: Path, orientation: int) -> None:
    corner = np.zeros((4, 4), np.uint8)
    corner[0, 0] = 255
    for client in "ab":
        for label in "xy":
            (tmp_path / client / label).mkdir(parents=True)
            paths = [turned(tmp_path / client / label / f"{n}.png", corner, orientation) for n in range(2)]
    data = ClientFolders(root=str(tmp_path), grayscale=True, image_size=4, test_fraction=0.5, batch_size=4)
    data.setup()
    with Image.open(paths[0]) as file:
        wanted = torch.from_numpy(np.array(ImageOps.exif_transpose(file))).float() / 255
    for loader in (
        data.train_loader(0, torch.Generator()),
        data.test_loader(1),
        data.new_inputs(tmp_path / "a").loader,
    ):
        for batch in loader:
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            assert torch.equal(x, wanted.expand_as(x))


def test_a_photograph_with_damaged_exif_data_is_as_it_is_stored(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "a.png", exif=b"Exif\x00\x00no EXIF at all")
    assert np.array_equal(read_image(tmp_path / "a.png", grayscale=True)[..., 0], GREY)
    assert image_size(tmp_path / "a.png") == (2, 2)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a.png": (lambda: _rgba(GREY), {}, "is transparent in places"),
    "b.png": (lambda: Image.merge("LA", (Image.fromarray(OPAQUE), Image.fromarray(GREY))), {}, "is transparent"),
    "c.png": (lambda: _palette(2), {}, "is transparent in places"),
    "d.png": (lambda: _palette(bytes([255, 254, 255, 255])), {}, "is transparent in places"),
    "e.png": (lambda: Image.fromarray(GREY).convert("RGB"), {"transparency": (51, 51, 51)}, "is transparent in places"),
    "f.png": (lambda: Image.fromarray(WIDE), {"transparency": 51 * 257}, "is transparent in places"),
    "g.tif": (lambda: Image.fromarray(GREY.astype(np.float32)), {}, "values from 0 to 255; scale them to 0 to 1"),
    "h.tif": (lambda: Image.fromarray(GREY / np.float32(255) - 0.1), {}, "values from -0.1 to 0.9"),
    "i.tif": (lambda: Image.fromarray(np.float32([[0.5, np.nan]])), {}, "floating-point values from nan"),
    "j.tif": (lambda: Image.fromarray(GREY.astype(np.int32)), {}, "32-bit integers up to 255 only; save it"),
    "k.tif": (lambda: Image.fromarray(GREY.astype(np.int32) - 1), {}, "values from -1 to 254; save them from 0"),
    "l.gif": (
        lambda: Image.fromarray(GREY),
        {"save_all": True, "append_images": [Image.fromarray(GREY.T.copy())]},
        "holds 2 pictures",
    ),
    "m.tif": (
        lambda: Image.fromarray(GREY),
        {"save_all": True, "append_images": [Image.fromarray(GREY)] * 2},
        "holds 3 pictures; save each as a separate file",
    ),
    "n.tif": (lambda: Image.fromarray(np.zeros((2, 2, 3), np.uint8), "LAB"), {}, "cannot be decoded; remove or"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_clear_value_is_refused_by_its_file(name: str, tmp_path: Path) -> None:
    make, options, message = REFUSED[name]
    make().save(tmp_path / name, **options)
    with pytest.raises(ConfigError) as told:
        read_image(tmp_path / name, grayscale=True)
    assert str(told.value).startswith(str(tmp_path / name))
    assert message in str(told.value)


def test_a_picture_for_whom_white_is_zero_is_turned_round(tmp_path: Path) -> None:
    Image.fromarray(65535 - WIDE).save(tmp_path / "inverse.tif", tiffinfo={262: 0})
    with Image.open(tmp_path / "inverse.tif") as stored:
        assert (stored.mode, stored.tag_v2[262]) == ("I;16", 0)
    assert np.array_equal(read_image(tmp_path / "inverse.tif", grayscale=True)[..., 0], GREY)


def test_persons_on_deep_photographs_are_not_white(tmp_path: Path) -> None:
    Image.fromarray(WIDE).save(tmp_path / "deep.png")
    found = _Reader(None)(tmp_path / "deep.png")
    assert found.dtype == np.uint8
    assert np.array_equal(found, np.repeat(GREY[..., None], 3, axis=2))


def test_bytes_and_deeper_images_share_a_batch_and_come_to_the_same(tmp_path: Path) -> None:
    for client in "ab":
        for label in "xy":
            place = tmp_path / client / label
            place.mkdir(parents=True)
            for n in range(5):
                stored = GREY if (client == "a") == (n % 2 == 0) else WIDE
                Image.fromarray(stored).save(place / f"{n}.png")
    data = ClientFolders(root=str(tmp_path), grayscale=True, image_size=2, test_fraction=0.4, batch_size=10)
    data.setup()
    wanted = torch.from_numpy(GREY / 255).float()
    for client_id in range(2):
        for loader in (data.train_loader(client_id, torch.Generator()), data.test_loader(client_id)):
            for x, _ in loader:
                assert x.dtype == torch.float32
                assert (x - wanted).abs().max() < 1e-7
    new = data.new_inputs(tmp_path / "a" / "x").loader
    assert max(float((x - wanted).abs().max()) for x in new) < 1e-7


def test_a_deep_image_is_resized_as_one_of_bytes_is(tmp_path: Path) -> None:
    Image.fromarray(GREY).save(tmp_path / "8.png")
    Image.fromarray(WIDE).save(tmp_path / "16.png")
    files = ImageFiles([str(tmp_path / name) for name in ("8.png", "16.png")], 1, True, [0, 1])
    # (0 + 51 + 102 + 255)/4 = 102; bytes are rounded after rows and again after columns
    assert [image.flatten().tolist() for image, _ in files] == [[pytest.approx(102, abs=1)], [pytest.approx(102)]]
