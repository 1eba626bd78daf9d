"""Draw some of the answers that ``tasks/main.py --task VQA --predictions-dir`` has written, wrong ones in red."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHOWN, SCALE, COLUMNS = 24, 8, 6


def main(argv: Sequence[str]) -> int:
    """Draw answers of all files, evenly spaced, each below its picture and question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", nargs="+", type=Path, help="files of answers, as JSON lines")
    parser.add_argument("--image-folder", required=True, type=Path, help="folder of the images that they name")
    parser.add_argument("--output", required=True, type=Path, help="file for the picture, .png")
    given = parser.parse_args(argv)
    answered = [json.loads(line) for file in given.answers for line in file.read_text(encoding="utf-8").splitlines()]
    numbers = np.linspace(0, len(answered) - 1, SHOWN).astype(int).tolist()
    images = [Image.open(given.image_folder / answered[number]["images"][0]) for number in numbers]
    width, height = images[0].width * SCALE + 50, images[0].height * SCALE + 40
    sheet = Image.new("RGB", (COLUMNS * width, -(-SHOWN // COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (number, image) in enumerate(zip(numbers, images, strict=True)):
        found, left, top = answered[number], place % COLUMNS * width + 8, place // COLUMNS * height + 4
        sheet.paste(image.resize((image.width * SCALE, image.height * SCALE), Image.Resampling.NEAREST), (left, top))
        pen.text((left, top + image.height * SCALE + 2), found["question"], fill="black")
        color = "green" if found["accuracy"] == 1 else "red"
        pen.text((left, top + image.height * SCALE + 16), found["answer"] or "(nothing)", fill=color)
    sheet.save(given.output)
    print(f"{SHOWN} pictures with answers: {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
