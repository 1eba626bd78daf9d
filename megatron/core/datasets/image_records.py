"""Records of texts with images: JSON lines beside a folder of images, and samples of tar files.

A record is one of ``megatron.core.tokenizers.records``, in whose texts ``<image>`` stands for each image of its
``image`` (a name, or a list) or ``images``; messages may have parts of the type ``image`` or ``image_url`` instead. Or
it is an image with a ``caption`` or ``text``. In a tar file (webdataset's layout) the files of a sample share a name up
to the first dot: a ``.json`` as above, or a list of turns, or a caption in a ``.txt``, beside its images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.images.expansion import MARKER
from megatron.core.images.files import ENDINGS, Member, TarImages, tar_samples
from megatron.core.tokenizers.records import FIELDS as TEXT_FIELDS
from megatron.core.tokenizers.records import Conversation, Pair, read_sample
from megatron.errors import DataError
from megatron.small_files import parse_json, shown

FIELDS = (*TEXT_FIELDS, "image", "images", "caption", "text")
"""Keys of records that are read; others may be there."""
_TEXTS = {"messages", "conversations", "prompt", "instruction"}
_NAMES = ("image", "path", "url", "image_url")


@dataclass(frozen=True)
class ImageRecord:
    """A text in which ``<image>`` stands for each of ``images``, names in the order of the text."""

    sample: Conversation | Pair
    images: tuple[str, ...]


def read_image_record(record: Mapping[str, Any]) -> ImageRecord:
    """What a record holds. Raises DataError for one of no known form, and where images and their marks differ."""
    names, has = names_of(record), {name for name, value in record.items() if value is not None}
    sample: Conversation | Pair
    if not has & _TEXTS and names and has & {"caption", "text"}:
        text = record["caption" if "caption" in has else "text"]
        if not isinstance(text, str):
            raise DataError(f"the caption is {shown(text)}; it must be a text")
        sample = Pair(MARKER * len(names), text, form="images with captions")
        named = list[str]()
    else:
        parts, named = with_marks(record)
        sample = read_sample(parts)
    found = [*named, *names]
    marks = sum(text.count(MARKER) for text in _texts(sample))
    if marks != len(found):
        raise DataError(
            f"names {len(found)} image{'s' * (len(found) != 1)} and has {MARKER} {marks} time{'s' * (marks != 1)} in "
            "its texts; each stands for an image"
        )
    return ImageRecord(sample, tuple(found))


def names_of(record: Mapping[str, Any]) -> list[str]:
    """Names of ``image`` or ``images`` of a record. Raises DataError for both, and for what is no name."""
    given = [record[key] for key in ("image", "images") if record.get(key) is not None]
    if len(given) > 1:
        raise DataError('has both "image" and "images"; give one')
    found = given[0] if given else []
    names = found if isinstance(found, list) else [found]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise DataError(f"an image is {shown(wrong[0])}; it must be the name of a file")
    return names


def with_marks(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A record with marks in place of the parts of its messages that are images, and the names of these.

    Raises DataError for a name that is no text.
    """
    parts = dict(record)
    return parts, [name for key in ("messages", "prompt", "completion") for name in _taken_parts(parts, key)]


def _taken_parts(record: dict[str, Any], key: str) -> list[str]:
    """Names of images among the parts of messages, in whose places markers are put."""
    messages, names = record.get(key), list[str]()
    if not isinstance(messages, list):
        return names
    taken = list[Any]()
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            taken.append(message)
            continue
        content = [_marked(part, names) for part in message["content"]]
        taken.append({**message, "content": content})
    record[key] = taken
    return names


def _marked(part: Any, names: list[str]) -> Any:
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url", "input_image"):
        return part
    name = next((part[key] for key in _NAMES if part.get(key) is not None), None)
    if isinstance(name, dict):
        name = name.get("url")
    if name is not None and not isinstance(name, str):
        raise DataError(f"an image is {shown(name)}; it must be the name of a file")
    names += [] if name is None else [name]
    return {"type": "text", "text": MARKER}


def _texts(sample: Conversation | Pair) -> Iterator[str]:
    if isinstance(sample, Pair):
        yield sample.prompt + sample.completion
    else:
        yield from (message["content"] or "" for message in sample.messages)


def read_tar_records(path: str, images: TarImages) -> Iterator[tuple[str, ImageRecord | DataError, list[Member]]]:
    """The samples of a tar file: their keys, what they hold, and the members that their images are."""
    for members in tar_samples(path):
        key = members[0].key
        try:
            yield key, *_tar_record(members, images)
        except DataError as error:
            yield key, error, []


def _tar_record(members: Sequence[Member], files: TarImages) -> tuple[ImageRecord, list[Member]]:
    images = [member for member in members if member.ending.endswith(ENDINGS)]
    texts = {member.ending: member for member in members if member.ending in (".json", ".txt")}
    if not texts:
        endings = ", ".join(sorted({member.ending for member in members}))
        raise DataError(f"has no text: a sample has a .json or .txt beside its images, and this one {endings}")
    member = texts.get(".json", texts.get(".txt"))
    assert member is not None, "one of them is there"
    content = files.read(member.name, member.offset, member.size)
    if member.ending == ".txt":
        try:
            record: Any = {"caption": content.decode().strip()}
        except UnicodeDecodeError as error:
            raise DataError(f"{member.name} is not UTF-8: byte 0x{content[error.start]:02x}") from None
    else:
        record = parse_json(content, where=member.name, error=DataError)
    if isinstance(record, list):
        record = {"conversations": record}
    if not isinstance(record, dict):
        raise DataError(f"{member.name} is {shown(record)}; it must be an object, or a list of turns")
    by_name = {name: each for each in images for name in (each.name.rpartition("/")[2], each.name)}
    if record.get("image") is None and record.get("images") is None:
        record = {**record, "images": [each.name for each in images]}
    found = read_image_record(record)
    if lacking := [name for name in found.images if name not in by_name]:
        raise DataError(f"names the image {shown(lacking[0])}, which is not one of its files")
    return found, [by_name[name] for name in found.images]
