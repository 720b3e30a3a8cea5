"""Shapes as PNG."""

from __future__ import annotations

from io import BytesIO

from PIL import Image, ImageDraw, ImageFont

from sidestep_tools.whatif.plot import HEIGHT, LETTERS, WIDTH, Label, Shapes

SCALE = 2
"""Pixels of the picture for one of the page."""
DRAWN = 2 * SCALE
"""Pixels while it is drawn: to halve the picture smooths lines, which Pillow does not."""


def png(drawn: Shapes) -> bytes:
    """Return shapes as PNG."""
    image = Image.new("RGB", (WIDTH * DRAWN, HEIGHT * DRAWN), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(LETTERS * DRAWN)
    for shape in drawn:
        if isinstance(shape, Label):
            at = (shape.left * DRAWN, shape.base * DRAWN)
            draw.text(at, shape.text, "black", font, "ms" if shape.centred else "rs")
            continue
        points = [(left * DRAWN, top * DRAWN) for left, top in shape.points]
        if shape.width:
            draw.line(points, shape.colour, shape.width * DRAWN, "curve")
        elif len({left for left, _ in points}) > 1:
            draw.polygon(points, shape.colour)
    file = BytesIO()
    image.reduce(DRAWN // SCALE).save(file, "PNG", optimize=True)
    return file.getvalue()
