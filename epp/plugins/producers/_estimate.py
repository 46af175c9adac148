"""Estimates tokens without a tokenizer: 4 bytes of the prompt count as one token, and a media item as many as a model likely uses.

The token ids are not those of an engine's vocabulary. They serve only to count tokens and to hash prefixes. A media item starts at a whole
token. The XXH64 of the item's content is the hash of its feature. The low 32 bits of this hash are the id of each token of the item.

Clients choose the sizes of media, so the estimates are bounded: one item counts at most ITEM_TOKENS_MAX tokens. At most PROMPTS_MAX
prompts and TOKENS_MAX tokens of media are estimated for one request.
"""

import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
from xxhash import xxh64_intdigest

from epp.request import BYTES_PER_TOKEN, Media, Parts
from epp.request.tokens import Feature, PromptTokens

ITEM_TOKENS_MAX = 1 << 17
TOKENS_MAX = 1 << 20
PROMPTS_MAX = 256
WIDTH, HEIGHT = 640, 360
PIXELS_PER_TOKEN = 1024
SECONDS = 10.0
SAMPLE_FPS = 2.0
SOURCE_FPS = 24.0
HEADER_CHARS = 1 << 18  # characters of base64 that are decoded; an image's size is in its header, before its pixels
LOW = 0xFFFFFFFF
VIDEO_FPS = "x-llm-d-video-fps"
VIDEO_SECONDS = "x-llm-d-video-duration-seconds"
VIDEO_RESOLUTION = "x-llm-d-video-resolution"

# Below the parameter `estimate`: parameters that have an effect only with some values of a mode.
DYNAMIC, SAMPLED = ("dynamic", ""), ("sampled", "")
COUNTS_WITH: Final = {
    "image.static": ("image.mode", ("static",)),
    "image.dynamic": ("image.mode", DYNAMIC),
    "image.defaultResolution": ("image.mode", DYNAMIC),
    "video.defaultResolution": ("video.tokensPerFrame.mode", DYNAMIC),
    "video.tokensPerFrame.static": ("video.tokensPerFrame.mode", ("static",)),
    "video.tokensPerFrame.dynamic": ("video.tokensPerFrame.mode", DYNAMIC),
    "video.frames.sampled": ("video.frames.mode", SAMPLED),
    "video.frames.strided": ("video.frames.mode", ("strided",)),
}

Size = tuple[int, int]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of the estimate. The description of each number says what 0 or less means."""


class Resolution(Settings, frozen=True):
    """Width and height in pixels.

    width: Pixels; 0 or less means 640.
    height: Pixels; 0 or less means 360.
    """

    width: int = 0
    height: int = 0

    def or_else(self, size: Size) -> Size:
        return (self.width if self.width > 0 else size[0], self.height if self.height > 0 else size[1])


class Static(Settings, frozen=True):
    """The same number of tokens for every image.

    static_token: Tokens of an image; 0 or less means 1.
    """

    static_token: int = 0


class StaticFrame(Settings, frozen=True):
    """The same number of tokens for every frame.

    num_tokens_per_frame: Tokens of a frame; 0 or less means 1.
    """

    num_tokens_per_frame: int = 0


class Dynamic(Settings, frozen=True):
    """A number of tokens in proportion to the size: width * height / factor.

    factor: Pixels per token; 0 or less means 1024.
    """

    factor: int = 0

    def tokens(self, size: Size) -> int:
        return size[0] * size[1] // (self.factor if self.factor > 0 else PIXELS_PER_TOKEN)


class Image(Settings, frozen=True):
    """How many tokens an image counts.

    mode: `dynamic` (also if empty): by the image's size in pixels. `static`: the same number for every image.
    default_resolution: The size of an image that is only a URL. If the request has the image's data, the data have the size.
    static: The number of tokens in the mode `static`.
    dynamic: How size becomes tokens in the mode `dynamic`.
    """

    mode: Literal["", "dynamic", "static"] = "dynamic"
    default_resolution: Resolution = Resolution()
    static: Static = Static()
    dynamic: Dynamic = Dynamic()

    def tokens(self, url: str) -> int:
        if self.mode == "static":
            return self.static.static_token
        return self.dynamic.tokens(image_size(url) or self.default_resolution.or_else((WIDTH, HEIGHT)))


class FrameTokens(Settings, frozen=True):
    """How many tokens one frame of a video counts.

    mode: `dynamic` (also if empty): by the size of the video in pixels. `static`: the same number for every frame.
    static: The number of tokens in the mode `static`.
    dynamic: How size becomes tokens in the mode `dynamic`.
    """

    mode: Literal["", "dynamic", "static"] = "dynamic"
    static: StaticFrame = StaticFrame()
    dynamic: Dynamic = Dynamic()


class Sampled(Settings, frozen=True):
    """A model that takes a number of frames per second, and then merges several frames into one.

    sample_fps: Frames that are taken per second; 0 or less means 2.
    temporal_patch_size: Frames that are merged into one; 0 or less means 1.
    """

    sample_fps: float = msgspec.field(default=0.0, name="sampleFPS")
    temporal_patch_size: int = 0


class Strided(Settings, frozen=True):
    """A model that takes every n-th frame of the video.

    default_source_fps: Frames per second of a video if no header of the request gives the number; 0 or less means 24.
    frame_stride: The n of "every n-th frame"; 0 or less means 1.
    """

    default_source_fps: float = msgspec.field(default=0.0, name="defaultSourceFPS")
    frame_stride: int = 0


class Frames(Settings, frozen=True):
    """How many frames of a video count.

    mode: `sampled` (also if empty): duration * sampleFPS, limited to minFrames and maxFrames, then divided by temporalPatchSize. `strided`:
        duration * frames per second of the video / frameStride, limited to minFrames and maxFrames.
    min_frames: The fewest frames; 0 or less means no limit.
    max_frames: The most frames; 0 or less means no limit.
    sampled: The numbers of the mode `sampled`.
    strided: The numbers of the mode `strided`.
    """

    mode: Literal["", "sampled", "strided"] = "sampled"
    min_frames: int = 0
    max_frames: int = 0
    sampled: Sampled = Sampled()
    strided: Strided = Strided()

    def count(self, seconds: float, source_fps: float) -> int:
        if self.mode == "strided":
            fps = positive(source_fps, self.strided.default_source_fps, SOURCE_FPS)
            return self._limited(whole(seconds * fps) // max(1, self.strided.frame_stride))
        frames = self._limited(whole(seconds * positive(self.sampled.sample_fps, SAMPLE_FPS)))
        return frames // max(1, self.sampled.temporal_patch_size)

    def _limited(self, frames: int) -> int:
        frames = max(frames, self.min_frames)
        return min(frames, self.max_frames) if self.max_frames > 0 else frames


class Video(Settings, frozen=True):
    """How many tokens a video counts: frames * tokens per frame, at most a maximum.

    Request headers may tell the video's size, duration and frames per second.

    default_resolution: The size of a video if no header of the request tells the size.
    default_duration: The duration of a video, in seconds, if no header of the request tells the duration; 0 or less means 10.
    tokens_per_frame: How many tokens a frame counts.
    frames: How many frames count.
    max_video_tokens: The most tokens that a video counts; 0 or less means no limit.
    """

    default_resolution: Resolution = Resolution()
    default_duration: float = 0.0
    tokens_per_frame: FrameTokens = FrameTokens()
    frames: Frames = Frames()
    max_video_tokens: int = 0

    def tokens(self, headers: Mapping[str, str]) -> int:
        seconds = positive(number(headers.get(VIDEO_SECONDS)), self.default_duration, SECONDS)
        tokens = self.frames.count(seconds, number(headers.get(VIDEO_FPS))) * self._frame(headers)
        return min(tokens, self.max_video_tokens) if self.max_video_tokens > 0 else tokens

    def _frame(self, headers: Mapping[str, str]) -> int:
        frame = self.tokens_per_frame
        if frame.mode == "static":
            return max(1, frame.static.num_tokens_per_frame)
        size = resolution(headers.get(VIDEO_RESOLUTION)) or self.default_resolution.or_else((WIDTH, HEIGHT))
        return max(1, frame.dynamic.tokens(size))


class Estimate(Settings, frozen=True):
    """How many tokens media count.

    image: How many tokens an image counts.
    video: How many tokens a video counts.
    """

    image: Image = Image()
    video: Video = Video()

    def prompts(self, parts: Parts, headers: Mapping[str, str]) -> list[PromptTokens]:
        """Returns the tokens of each prompt of a request. `headers`: the headers of the request, which may describe a video."""
        left = TOKENS_MAX
        prompts = []
        for pieces in parts.prompts[:PROMPTS_MAX]:
            prompt = self._prompt(pieces, headers, left)
            left -= sum(feature.length for feature in prompt.features)
            if prompt.token_ids is not None:
                prompts.append(prompt)
        return prompts

    def _prompt(self, pieces: Iterable[bytes | Media], headers: Mapping[str, str], left: int) -> PromptTokens:
        packed: list[bytes] = []
        size = 0
        features: list[Feature] = []
        for piece in pieces:
            if isinstance(piece, Media):
                missing = -size % BYTES_PER_TOKEN
                count = max(1, min(self.tokens(piece, headers), ITEM_TOKENS_MAX, left))
                left -= count
                hashed = xxh64_intdigest(piece.content.encode("utf-8", "surrogatepass"))
                features.append(Feature(piece.modality, f"{hashed:x}", (size + missing) // BYTES_PER_TOKEN, count))
                piece = bytes(missing) + (hashed & LOW).to_bytes(BYTES_PER_TOKEN, "little") * count
            packed.append(piece)
            size += len(piece)
        if not size:
            return PromptTokens(None)
        packed.append(bytes(-size % BYTES_PER_TOKEN))
        return PromptTokens(np.frombuffer(b"".join(packed), dtype="<u4"), features)

    def tokens(self, media: Media, headers: Mapping[str, str]) -> int:
        """Returns how many tokens one media item counts, before limits."""
        if media.modality == "image":
            return self.image.tokens(media.content)
        if media.modality == "video":
            return self.video.tokens(headers)
        return -(-len(media.content) // BYTES_PER_TOKEN)


def from_token_ids(token_ids: Sequence[Sequence[int]], features: Sequence[Feature] = ()) -> list[PromptTokens]:
    """Returns prompts that the client has tokenised. `features`: the media of the only prompt; ignored if there are several prompts."""
    arrays = (np.array(ids, dtype=np.uint32) for ids in token_ids[:PROMPTS_MAX])
    return [PromptTokens(ids, features if len(token_ids) == 1 else ()) for ids in arrays if len(ids)]


def positive(*values: float) -> float:
    """Returns the first value above 0, or 0 if no value is."""
    return next((value for value in values if value > 0), 0.0)


def whole(frames: float) -> int:
    return int(min(frames, ITEM_TOKENS_MAX))


def number(text: str | None) -> float:
    """Returns a header's value as a number; 0 if the header is missing or not a finite number above 0."""
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def resolution(text: str | None) -> Size | None:
    """Parses `WIDTHxHEIGHT`. Returns None if the text is invalid."""
    width, cross, height = (text or "").lower().partition("x")
    if not cross or len(width) > 9 or len(height) > 9:
        return None
    try:
        size = int(width), int(height)
    except ValueError:
        return None
    return size if min(size) > 0 else None


def image_size(url: str) -> Size | None:
    """Returns width and height of an image in pixels. Returns None unless the URL contains the data of a PNG, GIF or JPEG."""
    if not url.startswith("data:image/"):
        return None
    _, marker, payload = url[: HEADER_CHARS + 64].partition("base64,")
    try:
        data = binascii.a2b_base64(payload[: len(payload) & ~3]) if marker else b""
    except ValueError:
        return None
    size = None
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR" and len(data) >= 24:
        size = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    elif data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        size = int.from_bytes(data[6:8], "little"), int.from_bytes(data[8:10], "little")
    elif data.startswith(b"\xff\xd8"):
        size = _jpeg_size(data)
    return size if size and min(size) > 0 else None


def _jpeg_size(data: bytes) -> Size | None:
    """Returns the size from the first start-of-frame segment of a JPEG."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[at + 7 : at + 9], "big"), int.from_bytes(data[at + 5 : at + 7], "big")
        else:
            at += 2 + max(2, int.from_bytes(data[at + 2 : at + 4], "big"))
    return None
